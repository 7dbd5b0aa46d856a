# guard.cmake - ciranda-guard, the static supervisor that runs on the workers.
#
#   ciranda-guard          the guard for this machine's processor; CIRANDA_GUARD_BINARY is its path, empty where no static
#                          program can be linked
#   ciranda-guard-child    the program that the guard's tests run
#   ciranda-guard-asan     with CIRANDA_SANITIZE: the same sources, dynamic, with AddressSanitizer and UBSan
#   ciranda-guard-aarch64  where aarch64-linux-gnu-gcc is installed
include_guard()
include(CheckCSourceCompiles)

get_filename_component(guard_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
file(GLOB guard_sources CONFIGURE_DEPENDS "${guard_root}/engine/guard/*.c")
set(guard_output "${CMAKE_BINARY_DIR}/guard") # a directory of its own: Ninja takes a target's name for a file
file(MAKE_DIRECTORY "${guard_output}")
set(guard_header "${guard_root}/engine/guard/guard.h")
set(guard_flags -std=c11 -D_GNU_SOURCE -Wall -Wextra -Wconversion -Wshadow)
set(guard_small -Os -ffunction-sections -fdata-sections -Wl,--gc-sections -static -s)

# A program from the guard's sources, compiled and linked in one go: there are few of them and they are small.
function(add_guard name output compiler)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${compiler}" ${guard_flags} ${ARGN} ${guard_sources} -o "${output}"
    DEPENDS ${guard_sources} "${guard_header}"
    COMMENT "Building ${name}"
    VERBATIM)
  add_custom_target(${name} ALL DEPENDS "${output}")
endfunction()

find_program(MUSL_GCC musl-gcc)
find_program(AARCH64_GCC aarch64-linux-gnu-gcc)
mark_as_advanced(MUSL_GCC AARCH64_GCC)

set(CIRANDA_GUARD_BINARY "")
set(CMAKE_REQUIRED_LINK_OPTIONS -static)
check_c_source_compiles("int main(void) { return 0; }" CIRANDA_CAN_LINK_STATIC)
unset(CMAKE_REQUIRED_LINK_OPTIONS)
if(MUSL_GCC)
  set(CIRANDA_GUARD_BINARY "${guard_output}/ciranda-guard")
  add_guard(ciranda-guard "${CIRANDA_GUARD_BINARY}" "${MUSL_GCC}" ${guard_small})
elseif(CIRANDA_CAN_LINK_STATIC)
  message(STATUS "ciranda-guard: no musl-gcc, so it is linked with glibc and ten times as big (install musl-tools)")
  set(CIRANDA_GUARD_BINARY "${guard_output}/ciranda-guard")
  add_guard(ciranda-guard "${CIRANDA_GUARD_BINARY}" "${CMAKE_C_COMPILER}" ${guard_small})
else()
  message(STATUS "ciranda-guard: not built, for neither musl-gcc nor a static C library is installed")
endif()

if(CIRANDA_SANITIZE)
  add_guard(ciranda-guard-asan "${guard_output}/ciranda-guard-asan" "${CMAKE_C_COMPILER}"
            -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
endif()
if(AARCH64_GCC)
  add_guard(ciranda-guard-aarch64 "${guard_output}/ciranda-guard-aarch64" "${AARCH64_GCC}" ${guard_small})
endif()

add_custom_command(
  OUTPUT "${guard_output}/ciranda-guard-child"
  COMMAND "${CMAKE_C_COMPILER}" -D_GNU_SOURCE -Wall -Wextra -O1 "${guard_root}/tests/guard/child.c"
          -o "${guard_output}/ciranda-guard-child" -pthread
  DEPENDS "${guard_root}/tests/guard/child.c"
  COMMENT "Building ciranda-guard-child"
  VERBATIM)
add_custom_target(ciranda-guard-child ALL DEPENDS "${guard_output}/ciranda-guard-child")
