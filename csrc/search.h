// Selects the range of a histogram to quantize: the counts of one tensor in, its clipping range out.
//
// A candidate range is between edges of bins. Symmetric: [-t, t] (or [0, t] for codes from 0 up), scale t / qmax.
// Affine: [-a, b] around zero, scale (a + b) / (qmax - qmin), zero point qmin + round(a / scale). These are the grids
// that a quantizer makes of these ranges. Of equal candidates the widest is chosen.
//
// mse: the least sum of counts * (fake_quant(center) - center)^2 over the centers of the bins, on the actual grid with
// all its codes (pytorch-quantization's "mse" uses the narrow grid).
//
// l2: the same with each bin's counts spread evenly over it: the integral of the squared error, which torch.ao's
// HistogramObserver approximates.
//
// entropy: the least KL divergence of the quantized histogram, as in TensorRT's calibrator (S. Migacz, 8-bit Inference
// with TensorRT, GTC 2017) and pytorch-quantization. P is the histogram within the range, with the counts beyond it
// added to the last bin. Q is P without that addition, in as many levels as there are codes (symmetric: codes of one
// sign), with each level's counts spread evenly over its non-empty bins. First the bin at zero takes the count of its
// neighbour: else the zeros of ReLU dominate. A range has at least as many bins as levels, unless `candidates` lists
// the symmetric ranges to compare, in bins from zero; then all of them are scored.
//
// percentile: the range that holds that share of all values; affine: half of the rest is on each side. Within a bin,
// counts are spread evenly, as numpy.percentile interpolates between samples.
//
// mse, l2, entropy: symmetric ranges try every edge (with more than 4096 / 2^(bits - 8) edges every k-th, then the
// edges beside the best one, halving k). Affine ranges try a grid of at most 64 x 64 pairs of bounds (32 x 32 for 8
// bits), then the neighbours of the best pair, halving the step down to one bin: the least error, or one close to it.
#pragma once

#include <cstdint>
#include <vector>

namespace qtoolkit {

enum class Method { percentile, mse, l2, entropy };

struct Search {
  int64_t qmin, qmax;
  Method method;
  double percentile;
  bool symmetric;
  std::vector<int64_t> candidates;
};

struct Clip {
  float lo, hi;
};

Clip search(const int64_t* counts, float lo, float hi, int64_t n, const Search& how);

}  // namespace qtoolkit
