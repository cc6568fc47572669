# Writes a C++ file that holds the sources in csrc/device as text, and names it ONNXPAR_DEVICE_SOURCES.
file(GLOB device_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/device/*.cu
  ${CMAKE_CURRENT_SOURCE_DIR}/csrc/device/*.cuh)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${device_files})
set(text "#include \"cuda_compiler.h\"\n\nnamespace onnxpar::cuda {\n\n")
string(APPEND text "const SourceFile kSourceFiles[] = {\n")
foreach(file IN LISTS device_files)
  get_filename_component(name ${file} NAME)
  file(READ ${file} source)
  string(APPEND text "{\"${name}\", R\"device(${source})device\"},\n")
endforeach()
list(LENGTH device_files count)
string(APPEND text "};\nconst int kSourceFileCount = ${count};\n\n}  // namespace onnxpar::cuda\n")
set(ONNXPAR_DEVICE_SOURCES ${CMAKE_CURRENT_BINARY_DIR}/device_sources.cc)
file(CONFIGURE OUTPUT ${ONNXPAR_DEVICE_SOURCES} CONTENT "${text}" @ONLY)
set_source_files_properties(${ONNXPAR_DEVICE_SOURCES} PROPERTIES
  COMPILE_OPTIONS -I${CMAKE_CURRENT_SOURCE_DIR}/csrc)
