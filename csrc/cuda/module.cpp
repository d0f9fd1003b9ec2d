// An empty Python module: importing it loads the library, whose static initialisers register the ops.
#include <Python.h>

PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
