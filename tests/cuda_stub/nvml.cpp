/// @file
/// A libnvidia-ml.so.1 for the cards of cuda.cpp: what UCX asks of it.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct PciInfo {
    char legacy_id[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pci_device_id;
    unsigned pci_subsystem_id;
    char id[32];
};

struct FieldValue {
    unsigned field;
    unsigned scope;
    long long timestamp;
    long long latency;
    unsigned type;
    int result;
    unsigned long long value;
};

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int nvmlInit_v2() {
    return kSuccess;
}

int nvmlShutdown() {
    return kSuccess;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
    const char* text = std::getenv("CUDA_STUB_DEVICES");
    *count = text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 2;
    return kSuccess;
}

/// NVML counts all cards, whatever CUDA_VISIBLE_DEVICES says.
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    unsigned count = 0;
    nvmlDeviceGetCount_v2(&count);
    *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
    return index < count ? kSuccess : kInvalidArgument;
}

int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
    *info = {};
    info->bus = 0x10 + static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(device) - 1);
    std::snprintf(info->id, sizeof info->id, "00000000:%02X:00.0", info->bus);
    return kSuccess;
}

/// One NVLink each: without one, UCX does not read through cuda_ipc.
int nvmlDeviceGetFieldValues(void* /*device*/, int count, FieldValue* values) {
    for (int i = 0; i < count; ++i) {
        values[i].type = 1;  // unsigned int
        values[i].result = kSuccess;
        values[i].value = 1;
    }
    return kSuccess;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned /*link*/, PciInfo* info) {
    return nvmlDeviceGetPciInfo_v3(device, info);
}

int nvmlDeviceGetGpuFabricInfo(void* /*device*/, void* /*info*/) {
    return kNotSupported;
}

int nvmlDeviceGetGpuFabricInfoV(void* /*device*/, void* /*info*/) {
    return kNotSupported;
}

const char* nvmlErrorString(int result) {
    return result == kSuccess ? "success" : "not supported by the stub";
}

}  // extern "C"
#pragma GCC visibility pop
