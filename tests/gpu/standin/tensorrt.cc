// TensorRT's objects as far as onnxruntime's provider makes them to list its kernels: onnxruntime
// lists the kernels of all its providers or of none.
namespace {

long nothing() { return 0; }

// An object whose virtual functions, however many, do nothing, and whose members are such objects.
void* object() {
  static void* table[512];
  static void* members[64];
  for (void*& function : table) function = reinterpret_cast<void*>(&nothing);
  for (void*& member : members) member = members;
  members[0] = table;
  return members;
}

}  // namespace

extern "C" {

void* createInferBuilder_INTERNAL(void*, int) { return object(); }
void* createInferRefitter_INTERNAL(void*, void*, int) { return object(); }
void* createInferRuntime_INTERNAL(void*, int) { return object(); }
void* createNvOnnxParser_INTERNAL(void*, void*, int) { return object(); }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int) { return object(); }
void* getPluginRegistry(void) { return object(); }
int getInferLibVersion(void) { return 101400; }
}
