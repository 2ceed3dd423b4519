# Interface target with the instrumentation of a build: sanitizers or coverage, none by default.
add_library(pynixlkv_sanitizers INTERFACE)
if(PYNIXLKV_SANITIZE)
  string(REPLACE ";" "," pynixlkv_sanitize_list "${PYNIXLKV_SANITIZE}")
  target_compile_options(pynixlkv_sanitizers INTERFACE
    -fsanitize=${pynixlkv_sanitize_list} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if(PYNIXLKV_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # The fence of the UCX driver orders bytes between processes, which the sanitizer does not look at.
    target_compile_options(pynixlkv_sanitizers INTERFACE -Wno-tsan)
  endif()
  target_link_options(pynixlkv_sanitizers INTERFACE -fsanitize=${pynixlkv_sanitize_list})
endif()
if(PYNIXLKV_COVERAGE)
  target_compile_options(pynixlkv_sanitizers INTERFACE --coverage -O0 -fno-inline -fprofile-update=atomic)
  target_link_options(pynixlkv_sanitizers INTERFACE --coverage)
endif()
