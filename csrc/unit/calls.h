// How training steps repeat the op of a unit: Python passes the tensors that differ from step to step, and nothing
// else.
#pragma once

#include <torch/library.h>

namespace qtoolkit {

// Registers the classes of units, each with a method `call`.
void register_units(torch::Library& library);

}  // namespace qtoolkit
