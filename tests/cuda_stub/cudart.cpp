/// @file
/// The libcudart.so.12 that libucm_cuda of NIXL's wheel needs to load. On machines with a GPU,
/// PyTorch brings one; without libucm_cuda UCX takes device memory for host memory.

#include <cstddef>

extern "C" __attribute__((visibility("default"))) int cudaGetSymbolSize(std::size_t* /*size*/,
                                                                        const void* /*symbol*/) {
    return 13;  // cudaErrorInvalidSymbol: there are none
}
