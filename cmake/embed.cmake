# embed.cmake - makes a C file of the Lua modules (and the guard) for engine/embedded.h.
#
#   cmake -DOUTPUT=embedded_data.c -DLUADUMP=program -DMODULES=list [-DGUARD=file] -P embed.cmake
#
# `list` is a file of lines "name path file": the module's name, the chunk's name and the file to read. A blank parts them
# because it sorts before '.', so that sorted lines are sorted names, as engine/embedded.c searches them.
#
# Modules are compiled by LUADUMP (cmake/luadump.c), not stripped, so that line numbers and names in tracebacks hold, and
# compressed with gzip: all of them together are several times as large as the code in C.
cmake_policy(VERSION 3.20)

function(bytes_of file out)
  execute_process(COMMAND gzip -9 -n -c "${file}" OUTPUT_FILE "${OUTPUT}.gz" RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "embed.cmake: gzip failed on ${file}")
  endif()
  file(READ "${OUTPUT}.gz" hex HEX)
  file(REMOVE "${OUTPUT}.gz")
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
  execute_process(COMMAND "${LUADUMP}" "${file}" "@${path}" "${OUTPUT}.luac" RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "embed.cmake: ${file} cannot be compiled")
  endif()
  bytes_of("${OUTPUT}.luac" bytes)
  file(SIZE "${OUTPUT}.luac" size)
  string(APPEND arrays "static const unsigned char m${count}[] = {${bytes}0};\n")
  string(APPEND rows "    {\"${name}\", \"${path}\", {m${count}, sizeof m${count} - 1, ${size}}},\n")
  math(EXPR count "${count} + 1")
endforeach()

set(guard "")
set(guard_size 0)
if(GUARD)
  bytes_of("${GUARD}" guard)
  file(SIZE "${GUARD}" guard_size)
endif()

file(REMOVE "${OUTPUT}.luac")
file(WRITE "${OUTPUT}.new" "/* Made by cmake/embed.cmake. */
#include \"embedded.h\"
${arrays}
const cir_embedded cir_embedded_modules[] = {
${rows}};
const size_t cir_embedded_count = ${count};
static const unsigned char guard[] = {${guard}0};
const cir_blob cir_embedded_guard = {guard, sizeof guard - 1, ${guard_size}};
")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")
