// Registration of an op's body for all devices.
#pragma once

#include <torch/library.h>

#ifdef QTOOLKIT_CUDA
#define QT_REGISTER_CUDA(register_bodies) \
  TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) { register_bodies(m); }
#else
namespace qtoolkit {

inline void without_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name().name,
                              ": this build of qtoolkit has no CUDA kernels; with a CUDA toolkit installed, rebuild it "
                              "in its folder: QTOOLKIT_CUDA=1 pip install --no-build-isolation --force-reinstall "
                              "--no-deps . Or move the tensors to the CPU: x.cpu().");
}

// Registers that error under the name of each body.
struct WithoutCuda {
  torch::Library& library;
  template <class Body>
  void impl(const char* name, Body) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&without_cuda>());
  }
};

}  // namespace qtoolkit

#define QT_REGISTER_CUDA(register_bodies) \
  TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) { \
    ::qtoolkit::WithoutCuda errors = {m}; \
    register_bodies(errors);              \
  }
#endif

// Followed by a block of m.impl(name, body). A body serves CPU, CUDA and Meta tensors: it checks the arguments, makes
// the results, returns them if they are on the meta device, and else launches kernels. Up to there it uses symbolic
// sizes only, for torch.compile and torch.export.
#define QT_REGISTER_BODIES(m) QT_REGISTER_BODIES_AS(C10_ANONYMOUS_VARIABLE(register_bodies_), m)

#define QT_REGISTER_BODIES_AS(register_bodies, m)               \
  template <class Registry>                                     \
  static void register_bodies(Registry& m);                     \
  TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) { register_bodies(m); }  \
  TORCH_LIBRARY_IMPL(qtoolkit, Meta, m) { register_bodies(m); } \
  QT_REGISTER_CUDA(register_bodies)                             \
  template <class Registry>                                     \
  static void register_bodies(Registry& m)
