# Interface target that each of our own targets links privately, so that warnings never reach dependencies.
add_library(pynixlkv_warnings INTERFACE)
target_compile_options(pynixlkv_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of impossible overlaps inside std::string's operator+ (GCC bug 105329).
  target_compile_options(pynixlkv_warnings INTERFACE -Wno-restrict)
endif()
if(PYNIXLKV_WERROR)
  target_compile_options(pynixlkv_warnings INTERFACE -Werror)
endif()
