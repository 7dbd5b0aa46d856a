# embed.cmake - makes a C file of the Lua modules (and the guard) for engine/embedded.h.
#
#   cmake -DOUTPUT=embedded_data.c -DMODULES=list [-DGUARD=file] -P embed.cmake
#
# `list` is a file of lines "name path file": the module's name, the chunk's name and the file to read. A blank parts them
# because it sorts before '.', so that sorted lines are sorted names, as engine/embedded.c searches them.
#
# Sources are embedded as they are, not stripped, so that line numbers in tracebacks hold.
cmake_policy(VERSION 3.20)

function(bytes_of file out)
  file(READ "${file}" hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
  set(${out} "${hex}" PARENT_SCOPE)
endfunction()

set(arrays "")
set(rows "")
set(names "")
set(count 0)
file(STRINGS "${MODULES}" MODULE_LINES)
list(SORT MODULE_LINES)
foreach(line IN LISTS MODULE_LINES)
  if(NOT line MATCHES "^([^ ]+) ([^ ]+) (.+)$")
    message(FATAL_ERROR "embed.cmake: bad line: ${line}")
  endif()
  set(name "${CMAKE_MATCH_1}")
  set(path "${CMAKE_MATCH_2}")
  set(file "${CMAKE_MATCH_3}")
  if(name IN_LIST names)
    message(FATAL_ERROR "embed.cmake: the module ${name} is there twice")
  endif()
  list(APPEND names "${name}")
  bytes_of("${file}" bytes)
  file(SIZE "${file}" size)
  string(APPEND arrays "static const unsigned char m${count}[] = {${bytes}0};\n")
  string(APPEND rows "    {\"${name}\", \"${path}\", m${count}, ${size}},\n")
  math(EXPR count "${count} + 1")
endforeach()

set(guard "0")
set(guard_size 0)
if(GUARD)
  bytes_of("${GUARD}" guard)
  file(SIZE "${GUARD}" guard_size)
endif()

file(WRITE "${OUTPUT}.new" "/* Made by cmake/embed.cmake. */
#include \"embedded.h\"
${arrays}
const cir_embedded cir_embedded_modules[] = {
${rows}};
const size_t cir_embedded_count = ${count};
const unsigned char cir_guard_bytes[] = {${guard}};
const size_t cir_guard_size = ${guard_size};
")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")
