// qtoolkit._snapshot: whether objects still have the attributes that they had, as identities.
//
// A decision that reads the attributes of modules holds as long as they are the same objects. Comparing some hundred
// pointers takes some microseconds, less than the questions in Python. Written to Python's stable ABI, without torch.
#undef Py_LIMITED_API  // torch asks for 3.10
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <utility>
#include <vector>

namespace {

// The entries of a dictionary, with no value where it does not count. All references are owned, so that no other object
// can take their place in memory.
struct Contents {
  PyObject* dict;
  std::vector<std::pair<PyObject*, PyObject*>> items;
};

// An object, its type, and its dictionary: the object itself if it is one.
struct Kind {
  PyObject *object, *type, *attributes;
};

struct State {
  std::vector<Kind> kinds;
  std::vector<Contents> contents;
  PyObject* ignored = nullptr;  // a frozenset of keys
};

struct Snapshot {
  PyObject_HEAD State* state;
};

int add_contents(State& state, PyObject* dict, bool deeper) {
  Contents contents{dict, {}};
  Py_INCREF(dict);
  std::vector<PyObject*> inner;
  PyObject *key, *value;
  Py_ssize_t place = 0;
  int is_ignored = 0;
  while (is_ignored >= 0 && PyDict_Next(dict, &place, &key, &value)) {
    is_ignored = PySet_Contains(state.ignored, key);
    Py_INCREF(key);
    if (is_ignored == 0) Py_INCREF(value);
    contents.items.emplace_back(key, is_ignored == 0 ? value : nullptr);
    if (is_ignored == 0 && deeper && PyDict_Check(value)) inner.push_back(value);
  }
  state.contents.push_back(std::move(contents));
  if (is_ignored < 0) return -1;
  for (PyObject* each : inner) {
    if (add_contents(state, each, false) < 0) return -1;
  }
  return 0;
}

int visit(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const State* state = reinterpret_cast<Snapshot*>(self)->state;
  if (state == nullptr) return 0;
  Py_VISIT(state->ignored);
  for (const Kind& kind : state->kinds) {
    Py_VISIT(kind.object);
    Py_VISIT(kind.type);
    Py_VISIT(kind.attributes);
  }
  for (const Contents& contents : state->contents) {
    Py_VISIT(contents.dict);
    for (const auto& [key, value] : contents.items) {
      Py_VISIT(key);
      Py_VISIT(value);  // may be null
    }
  }
  return 0;
}

int clear(PyObject* self) {
  State* state = std::exchange(reinterpret_cast<Snapshot*>(self)->state, nullptr);
  if (state == nullptr) return 0;
  for (const Kind& kind : state->kinds) {
    Py_DECREF(kind.object);
    Py_DECREF(kind.type);
    Py_XDECREF(kind.attributes);
  }
  for (const Contents& contents : state->contents) {
    Py_DECREF(contents.dict);
    for (const auto& [key, value] : contents.items) {
      Py_DECREF(key);
      Py_XDECREF(value);
    }
  }
  Py_XDECREF(state->ignored);
  delete state;
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  const auto free_object = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  free_object(self);
  Py_DECREF(type);
}

// The dictionary of an object, a new reference.
PyObject* attributes_of(PyObject* object) {
  return PyDict_Check(object) ? Py_NewRef(object) : PyObject_GenericGetDict(object, nullptr);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject *objects, *ignored;
  if (!PyArg_ParseTuple(args, "O!O!:Snapshot", &PyTuple_Type, &objects, &PyFrozenSet_Type, &ignored)) return nullptr;
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self == nullptr) return nullptr;
  auto* state = new (std::nothrow) State;
  reinterpret_cast<Snapshot*>(self)->state = state;
  if (state == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  Py_INCREF(ignored);
  state->ignored = ignored;
  for (Py_ssize_t i = 0; i < PyTuple_Size(objects); ++i) {
    PyObject* object = PyTuple_GetItem(objects, i);
    PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(object));
    Py_INCREF(object);
    Py_INCREF(kind);
    PyObject* attributes = attributes_of(object);
    state->kinds.push_back({object, kind, attributes});
    if (attributes == nullptr || add_contents(*state, attributes, !PyDict_Check(object)) < 0) {
      Py_DECREF(self);
      return nullptr;
    }
  }
  return self;
}

PyObject* holds(PyObject* self, PyObject* /*unused*/) {
  const State* state = reinterpret_cast<Snapshot*>(self)->state;
  for (const Kind& kind : state->kinds) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(kind.object)) != kind.type) Py_RETURN_FALSE;
    PyObject* attributes = attributes_of(kind.object);
    if (attributes == nullptr) return nullptr;
    Py_DECREF(attributes);
    if (attributes != kind.attributes) Py_RETURN_FALSE;
  }
  for (const Contents& contents : state->contents) {
    if (static_cast<size_t>(PyDict_Size(contents.dict)) != contents.items.size()) Py_RETURN_FALSE;
    auto old = contents.items.begin();
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(contents.dict, &place, &key, &value)) {
      if (key != old->first || (old->second != nullptr && value != old->second)) Py_RETURN_FALSE;
      ++old;
    }
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"holds", holds, METH_NOARGS,
     "Return whether each object has the type and the attributes that it had, and each of its dictionaries the "
     "entries."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("Snapshot(objects, ignored): the attributes of a tuple of objects or dictionaries now,\n"
                       "without those whose names are in a frozenset.")},
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"qtoolkit._snapshot.Snapshot", sizeof(Snapshot), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "qtoolkit._snapshot", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__snapshot() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, "Snapshot", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(type);
  return module;
}
