/// @file
/// Enumerations of the Python side as parameters and results of native functions.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "transfer/types.hpp"

namespace pybind11::detail {

/// Takes a member, or its name in any case.
/// @tparam Names the module and the class, and how an error calls a member
template <class Enum, class Names>
struct python_enum_caster {
    static const object& python_class() {
        PYBIND11_CONSTINIT static gil_safe_call_once_and_store<object> storage;
        return storage
            .call_once_and_store_result(
                [] { return module_::import(Names::kModule).attr(Names::kClass); })
            .get_stored();
    }

    bool load(handle source, bool /*convert*/) {
        object member = reinterpret_borrow<object>(source);
        if (PyUnicode_Check(source.ptr())) {
            member = python_class().attr("__members__").attr("get")(source.attr("upper")());
        }
        if (!isinstance(member, python_class())) {
            throw pynixlkv::Error("ConfigError", pynixlkv::text(std::string(repr(source)),
                                                                " is not ", Names::kMember));
        }
        value = static_cast<Enum>(member.cast<int>());
        return true;
    }

    static handle cast(Enum source, return_value_policy /*policy*/, handle /*parent*/) {
        // Calling the class takes longer than polling a transfer does.
        PYBIND11_CONSTINIT static gil_safe_call_once_and_store<object> members;
        return members
            .call_once_and_store_result([] { return python_class().attr("_value2member_map_"); })
            .get_stored()[int_(static_cast<int>(source))]
            .template cast<object>()
            .release();
    }

    template <class T>
    using cast_op_type = movable_cast_op_type<T>;
    operator Enum*() { return &value; }
    operator Enum&() { return value; }
    operator Enum&&() && { return std::move(value); }

  private:
    Enum value{};
};

struct memory_type_names {
    static constexpr const char* kModule = "pynixlkv.types";
    static constexpr const char* kClass = "MemoryType";
    static constexpr const char* kMember =
        "a memory type; it must be one of DRAM, VRAM, BLOCK, OBJECT, FILE, BLK, OBJ";
};

template <>
struct type_caster<pynixlkv::transfer::Memory>
    : python_enum_caster<pynixlkv::transfer::Memory, memory_type_names> {
    static constexpr auto name =
        io_name("pynixlkv.types.MemoryType | str", "pynixlkv.types.MemoryType");
};

struct operation_names {
    static constexpr const char* kModule = "pynixlkv.types";
    static constexpr const char* kClass = "Operation";
    static constexpr const char* kMember = "an operation; it must be READ or WRITE";
};

template <>
struct type_caster<pynixlkv::transfer::Op>
    : python_enum_caster<pynixlkv::transfer::Op, operation_names> {
    static constexpr auto name =
        io_name("pynixlkv.types.Operation | str", "pynixlkv.types.Operation");
};

}  // namespace pybind11::detail
