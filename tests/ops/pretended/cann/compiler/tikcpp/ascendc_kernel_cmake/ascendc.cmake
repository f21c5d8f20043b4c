# The macros of CANN's kernel build that our CMakeLists.txt uses, with g++ and the CPU emulator as the device compiler. Our own
# text, after the documented behaviour: options of a target are set on NAME_interface after the library is declared; sources
# are preprocessed, launch functions and their headers are made from the entry points found there; objects are merged by a
# script that wants the build type.
set(ASCENDC_KERNEL_CMAKE_DIR "${CMAKE_CURRENT_LIST_DIR}")
foreach(needed SOC_VERSION ASCEND_CANN_PACKAGE_PATH RUN_MODE)
  if(NOT ${needed})
    message(FATAL_ERROR "${needed} is not set")
  endif()
endforeach()
if(NOT SOC_VERSION MATCHES "^ascend910(b[1-4]|_93[0-9][0-9])")
  message(FATAL_ERROR "SOC_VERSION ${SOC_VERSION} does not support")
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O0")  # made for a test, and not to be waited for
find_package(Python3 REQUIRED COMPONENTS Interpreter)

function(ascendc_library target type)
  set(generated "${CMAKE_BINARY_DIR}/auto_gen/${target}")
  set(headers "${CMAKE_BINARY_DIR}/include/${target}")
  set(include "${ASCEND_CANN_PACKAGE_PATH}/include")
  file(WRITE "${generated}/empty.cpp" "")
  add_library(${target}_interface STATIC EXCLUDE_FROM_ALL "${generated}/empty.cpp")
  set(definitions "$<TARGET_PROPERTY:${target}_interface,DEFINITIONS>")
  set(flags -std=c++17 "-I${include}" "-I${CMAKE_CURRENT_SOURCE_DIR}/emulator")
  separate_arguments(options UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  set(objects)
  foreach(source ${ARGN})
    get_filename_component(path "${source}" ABSOLUTE)
    get_filename_component(name "${source}" NAME_WE)
    add_custom_command(OUTPUT "${generated}/${name}.i"
      COMMAND "${CMAKE_CXX_COMPILER}" -E -P ${flags} -DPRETENDED_PREPROCESS "-D$<JOIN:${definitions},;-D>" "${path}" -o "${generated}/${name}.i"
      DEPENDS "${path}" COMMAND_EXPAND_LISTS VERBATIM)
    add_custom_command(OUTPUT "${generated}/${name}_stub.cpp"
      COMMAND "${Python3_EXECUTABLE}" "${ASCENDC_KERNEL_CMAKE_DIR}/launches.py" "${generated}/${name}.i" "${path}"
        "${generated}/${name}_stub.cpp" "${headers}"
      DEPENDS "${generated}/${name}.i" VERBATIM)
    add_custom_command(OUTPUT "${generated}/${name}.o"
      COMMAND "${CMAKE_CXX_COMPILER}" ${flags} ${options} -O1 -fPIC -w "-D$<JOIN:${definitions},;-D>" -c "${generated}/${name}_stub.cpp" -o
        "${generated}/${name}.o"
      DEPENDS "${generated}/${name}_stub.cpp" COMMAND_EXPAND_LISTS VERBATIM)
    list(APPEND objects "${generated}/${name}.o")
  endforeach()
  add_custom_target(${target}_merge_obj ALL
    COMMAND bash merge.sh -o "${generated}/merged.o" --objects "${objects}" --build-type ${CMAKE_BUILD_TYPE}
    DEPENDS ${objects} WORKING_DIRECTORY "${ASCENDC_KERNEL_CMAKE_DIR}" COMMAND_EXPAND_LISTS)
  add_library(${target} ${type} "${generated}/empty.cpp")
  add_dependencies(${target} ${target}_merge_obj)
  target_include_directories(${target} INTERFACE "${headers}")
  target_link_libraries(${target} INTERFACE "${generated}/merged.o")
endfunction()

function(ascendc_compile_definitions target scope)
  set_property(TARGET ${target}_interface APPEND PROPERTY DEFINITIONS ${ARGN})
endfunction()
