# Interface target that each of our own targets links privately, so that warnings never reach dependencies.
add_library(pynixlkv_warnings INTERFACE)
target_compile_options(pynixlkv_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual)
if(PYNIXLKV_WERROR)
  target_compile_options(pynixlkv_warnings INTERFACE -Werror)
endif()
