// What a UCX driver tells its peers, and what it believes of what peers tell.
#include <random>
#include <string>

#include "base/bytes.hpp"
#include "check.hpp"
#include "ucx/regions.hpp"
#include "ucx/status.hpp"

using namespace pynixlkv;
using namespace pynixlkv::ucx;

namespace {

/// What describe() writes for two regions, written by hand: describe() itself needs a library.
std::string description() {
    ByteWriter out;
    out.put_raw("pnkvucx4");
    out.put(std::uint8_t{1});
    out.put(std::uint64_t{7});
    out.put_bytes("the worker's address");
    out.put_bytes("the host");
    out.put(std::uint64_t{0x2000});
    out.put_bytes("the lanes");
    out.put(std::uint32_t{2});
    for (const std::uint64_t base : {0x1000U, 0x9000U}) {
        out.put(base);
        out.put(std::uint64_t{0x100});
        out.put(std::uint64_t{3});
        out.put_bytes("a packed key");
    }
    return out.take();
}

bool is_refused(const std::string& bytes) {
    try {
        (void)read_description(bytes);
    } catch (const Error& e) {
        CHECK_EQ(e.kind(), "WireError");
        return true;
    }
    return false;
}

}  // namespace

TEST_CASE("a description is read as it was written") {
    const std::string bytes = description();
    const Description read = read_description(bytes);
    CHECK(read.errors == capi::kErrorPeer);
    CHECK_EQ(read.token, std::uint64_t{7});
    CHECK_EQ(read.address, "the worker's address");
    CHECK_EQ(read.host, "the host");
    CHECK_EQ(read.token_address, std::uint64_t{0x2000});
    CHECK_EQ(read.lanes, "the lanes");
    CHECK(!is_on_this_host(read));
    CHECK_EQ(read.regions.size(), std::size_t{2});
    CHECK((read.regions[1].row == Descriptor{0x9000, 0x100, 3}));
    CHECK_EQ(read.regions[1].packed_key, "a packed key");
}

TEST_CASE("a description that ends early or late is refused at every length") {
    const std::string bytes = description();
    for (std::size_t length = 0; length < bytes.size(); ++length) {
        CHECK(is_refused(bytes.substr(0, length)));
    }
    CHECK(is_refused(bytes + '\0'));
}

TEST_CASE("impossible regions, addresses and counts are refused") {
    const auto with = [](std::uint64_t base, std::uint64_t length, std::string_view key,
                         std::string_view address = "a", std::uint32_t count = 1,
                         std::uint8_t errors = 1, std::string_view host = "") {
        ByteWriter out;
        out.put_raw("pnkvucx4");
        out.put(errors);
        out.put(std::uint64_t{7});
        out.put_bytes(address);
        out.put_bytes(host);
        out.put(std::uint64_t{0x2000});
        out.put_bytes("the lanes");
        out.put(count);
        out.put(base);
        out.put(length);
        out.put(std::uint64_t{0});
        out.put_bytes(key);
        return out.take();
    };
    CHECK(!is_refused(with(1, 1, "k")));
    CHECK(is_refused(with(1, 0, "k")));
    CHECK(is_refused(with(~std::uint64_t{0}, 2, "k")));
    CHECK(is_refused(with(1, 1, "")));
    CHECK(is_refused(with(1, 1, std::string(5000, 'k'))));
    CHECK(is_refused(with(1, 1, "k", "")));
    CHECK(is_refused(with(1, 1, "k", std::string(70000, 'a'))));
    CHECK(is_refused(with(1, 1, "k", "a", 2)));
    CHECK(is_refused(with(1, 1, "k", "a", 0xFFFFFFFFU)));
    CHECK(is_refused(with(1, 1, "k", "a", 1, 2)));
    CHECK(!is_refused(with(1, 1, "k", "a", 1, 1, "a host")));
    CHECK(is_refused(with(1, 1, "k", "a", 1, 1, std::string(65, 'h'))));
    CHECK(is_refused("pnkvucx1" + with(1, 1, "k").substr(8)));
}

TEST_CASE("no mutation is read beyond its end") {
    std::mt19937 random(7);  // NOLINT(cert-msc32-c,cert-msc51-cpp)
    const std::string good = description();
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes = good;
        for (unsigned n = random() % 4; n > 0; --n) {
            bytes[random() % bytes.size()] = static_cast<char>(random());
        }
        bytes.resize(bytes.size() - random() % 3);
        // A heap copy of the exact size, so that a sanitizer sees every byte too far.
        const std::vector<char> exact(bytes.begin(), bytes.end());
        try {
            const Description read = read_description({exact.data(), exact.size()});
            for (const auto& region : read.regions) {
                CHECK(region.packed_key.data() >= exact.data());
                CHECK(region.packed_key.data() + region.packed_key.size() <=
                      exact.data() + exact.size());
            }
        } catch (const Error& e) {
            CHECK_EQ(e.kind(), "WireError");
        }
    }
}

TEST_CASE("a region map finds what contains a row, with and without a hint") {
    RemoteRegions regions;
    regions.add({{100, 50, 0}, nullptr, nullptr});
    regions.add({{150, 50, 0}, nullptr, nullptr});
    regions.add({{100, 50, 1}, nullptr, nullptr});
    const RemoteRegion* hint = nullptr;
    CHECK_EQ(regions.find({100, 50, 0}, hint).row.address, std::uint64_t{100});
    CHECK_EQ(regions.find({199, 1, 0}, hint).row.address, std::uint64_t{150});
    CHECK_EQ(regions.find({120, 5, 1}, hint).row.device, std::uint64_t{1});
    CHECK_THROWS(Error, regions.find({140, 20, 0}, hint));
    CHECK_THROWS(Error, regions.find({99, 1, 0}, hint));
    CHECK_THROWS(Error, regions.find({100, 51, 1}, hint));
    CHECK_THROWS(Error, regions.find({100, ~std::uint64_t{0}, 0}, hint));
    regions.remove({100, 50, 1});
    hint = nullptr;
    CHECK_THROWS(Error, regions.find({120, 5, 1}, hint));
}

TEST_CASE("statuses have names, and say whether they are about the connection") {
    CHECK_EQ(status_name(Status::kConnectionReset), "CONNECTION_RESET");
    CHECK_EQ(status_name(static_cast<Status>(-45)), "link failure");
    CHECK_EQ(status_name(static_cast<Status>(-70)), "endpoint failure");
    CHECK_EQ(status_name(static_cast<Status>(-30)), "unlisted status");
    CHECK(is_connection_failure(static_cast<Status>(-45)));
    CHECK(is_connection_failure(Status::kEndpointTimeout));
    CHECK(!is_connection_failure(Status::kNoMemory));
    CHECK(!is_connection_failure(static_cast<Status>(-30)));
    const NativeError error = make_error(Status::kRejected, "ucp_get_nbx", "row 3");
    CHECK_EQ(error.library(), "ucx");
    CHECK_EQ(error.status(), -23);
    CHECK_EQ(std::string(error.what()), "ucp_get_nbx failed (row 3): REJECTED (-23)");
}

int main() {
    return check::run();
}
