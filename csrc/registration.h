// Registration of an op's body for all devices.
#pragma once

#include <torch/library.h>

#ifdef QTOOLKIT_CUDA
#define QT_REGISTER_CUDA(register_bodies) \
  TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) { register_bodies(m); }
#else
#define QT_REGISTER_CUDA(register_bodies)
#endif

// Followed by a block of m.impl(name, body). A body serves CPU, CUDA and Meta tensors: it checks the arguments, makes
// the results, returns them if they are on the meta device, and else launches kernels. Up to there it uses symbolic
// sizes only, for torch.compile and torch.export.
#define QT_REGISTER_BODIES(m)                                   \
  static void register_bodies(torch::Library& m);               \
  TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) { register_bodies(m); }  \
  TORCH_LIBRARY_IMPL(qtoolkit, Meta, m) { register_bodies(m); } \
  QT_REGISTER_CUDA(register_bodies)                             \
  static void register_bodies(torch::Library& m)
