// Which range of a histogram to quantize: one tensor's counts in, its clipping range out.
//
// A candidate range has its ends on edges of bins. Symmetric: [-t, t] (codes from 0 up: [0, t]), scale t / qmax.
// Affine:
// [-a, b] around zero, scale (a + b) / (qmax - qmin), zero point qmin + round(a / scale): the grids that a quantizer
// makes of these ranges. Of equal candidates the widest is chosen.
//
// mse: the least sum of counts * (fake_quant(center) - center)^2, centers of bins, over the actual grid with all its
//   codes (pytorch-quantization's "mse" takes the narrow one).
// l2: the same with each bin's counts spread evenly over it: the integral of the squared error, as torch.ao's
//   HistogramObserver approximates.
// entropy: the least KL divergence of what quantization leaves of the histogram, as in TensorRT's calibrator (S.
// Migacz,
//   8-bit Inference with TensorRT, GTC 2017) and pytorch-quantization: P is the histogram within the range, with all
//   that lies beyond added to the last bin; Q is P without it, in as many levels as there are codes (symmetric: on one
//   side), each level's counts spread evenly over its bins that are not empty. The bin at zero first takes its
//   neighbour's count: else the zeros of ReLU decide. A range has as many bins as levels at the least.
// percentile: the range that holds that share of all values; affine: half of the rest lies beyond each end. Within a
// bin
//   counts are taken as spread evenly, as numpy.percentile does between samples.
//
// mse, l2, entropy: symmetric ranges try every edge (of more than 4096 / 2^(bits - 8) edges every k-th, then those
// beside the best, halving k); affine ranges try a grid of at most 64 x 64 pairs of ends (32 x 32 for 8 bits), then
// neighbours of the best pair, halving the step down to one bin: the least error, or one that is next to it.
#pragma once

#include <cstdint>

namespace qtoolkit {

enum class Method { percentile, mse, l2, entropy };

struct Search {
  int64_t qmin, qmax;
  Method method;
  double percentile;
  bool symmetric;
};

struct Clip {
  float lo, hi;
};

Clip search(const int64_t* counts, float lo, float hi, int64_t n, const Search& how);

}  // namespace qtoolkit
