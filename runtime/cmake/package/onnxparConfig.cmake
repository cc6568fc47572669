# The target onnxpar::ops: the operator library and its C interface (onnxpar.h). The folder is that of
# an installed Python package, so paths are relative to this file.
get_filename_component(_onnxpar_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET onnxpar::ops)
  add_library(onnxpar::ops SHARED IMPORTED)
  set_target_properties(onnxpar::ops PROPERTIES
    IMPORTED_LOCATION "${_onnxpar_root}/lib/libonnxpar_ops${CMAKE_SHARED_LIBRARY_SUFFIX}"
    INTERFACE_INCLUDE_DIRECTORIES "${_onnxpar_root}/include")
endif()
set(onnxpar_FOUND TRUE)
unset(_onnxpar_root)
