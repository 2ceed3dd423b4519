#include "base/error.hpp"
#include "check.hpp"

using namespace pynixlkv;

TEST_CASE("an error carries its kind and message") {
    const Error e("PlanError", "block 9 at index 2 is not below num_blocks 4");
    CHECK_EQ(e.kind(), "PlanError");
    CHECK_EQ(std::string(e.what()), "block 9 at index 2 is not below num_blocks 4");
}

TEST_CASE("a native error carries library, call, status and detail") {
    const NativeError e("nixl", "backend", -2, "post_xfer_req", "to peer p0", "message");
    CHECK_EQ(e.library(), "nixl");
    CHECK_EQ(e.status(), -2);
    CHECK_EQ(e.call(), "post_xfer_req");
    CHECK_EQ(e.detail(), "to peer p0");
}

int main() {
    return check::run();
}
