// Functions with the quantizers after them on CUDA. A row of a norm stays in the registers of a warp, or of a
// block, so that each direction reads its tensors once, as those of functions of an element do.
#include "../fake_quant.h"
#include "../unit/function_rows.h"
#include "gradients.cuh"
#include "index_divisor.h"
#include "kernels.h"
#include "loops.cuh"
#include "rows.cuh"
#include "unit_scales.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// Calls f(i, place) for the vectors of a row that a thread holds.
template <int kTeam, int kMost, class F>
QT_DEVICE void each_vector(int64_t length, F f) {
  const int thread = threadIdx.x % kTeam, vectors = static_cast<int>(length) / kVectorSize;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int vector = thread + i * kTeam;
    if (vector < vectors) f(i, whole_at(int64_t{kVectorSize} * vector));
  }
}

// A vector of a parameter; of one that there is not, a number.
QT_DEVICE void load_or(const float* data, const Contiguous& at, float other, float (&v)[kVectorSize]) {
  if (data != nullptr) return load_dense(data, at, v);
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = other;
}

// Normalized values times the weight, plus the bias.
QT_DEVICE void shift(const FunctionRows& args, const Contiguous& at, const float (&normal)[kVectorSize],
                     const float (&weight)[kVectorSize], float (&z)[kVectorSize]) {
  float bias[kVectorSize];
  load_or(args.bias, at, 0, bias);
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) z[k] = normal[k] * weight[k] + bias[k];
}

// The grid of all rows.
struct RowsGrid {
  Divisor scale;
  float zero_point;

  __device__ explicit RowsGrid(const FunctionRows& args)
      : scale(usable_scale(made_scale(args.made, args.scale))),
        zero_point(args.zero_point == nullptr ? 0.0f
                                              : usable_zero_point(__ldg(static_cast<const float*>(args.zero_point)))) {}
};

template <class Functor>
QT_DEVICE Functor functor_of(const FunctionRows& args) {
  return {static_cast<float>(args.bounds.lo), static_cast<float>(args.bounds.hi)};
}

// Adds a row of the residual to one of x, and stores the sum.
template <int kTeam, int kMost>
QT_DEVICE void add_residual(const FunctionRows& args, int64_t row, int64_t length, float (&v)[kMost][kVectorSize]) {
  with_type<float, Kind::values>(args.residual_dtype, [&](const auto* type) {
    const auto* residual = static_cast<decltype(type)>(args.residual) + row * args.length;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
      float r[kVectorSize];
      load_dense(residual, at, r);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) v[i][k] += r[k];
      store_dense(args.sum + row * args.length, at, true, v[i]);
    });
  });
}

// Adds a row of the gradient from the other users of a sum, and stores the result in the type of the narrow addend too.
template <int kTeam, int kMost>
QT_DEVICE void join_sum(const FunctionRows& args, int64_t start, int64_t length, float (&v)[kMost][kVectorSize]) {
  if (args.grad_sum != nullptr) {
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
      float g[kVectorSize];
      load_dense(args.grad_sum + start, at, g);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) v[i][k] += g[k];
    });
  }
  if (args.narrow == nullptr) return;
  with_type<float, Kind::values>(args.narrow_dtype, [&](auto* type) {
    auto* narrow = static_cast<decltype(type)>(args.narrow) + start;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) { store_dense(narrow, at, true, v[i]); });
  });
}

template <int kTeam, int kMost>
__global__ void __launch_bounds__(kThreads, 2) norm_rows_kernel(const __grid_constant__ FunctionRows args) {
  using F = IntegerFunctor<float, float>;
  constexpr int kRows = kThreads / kTeam;
  const auto functor = functor_of<F>(args);
  const RowsGrid grid(args);
  const float count = static_cast<float>(args.length), eps = static_cast<float>(args.eps);
  // All threads of a block take part in each reduction, those of a row that there is not too.
  for (int64_t first = int64_t{blockIdx.x} * kRows; first < args.rows; first += int64_t{gridDim.x} * kRows) {
    const int64_t row = first + threadIdx.x / kTeam, length = row < args.rows ? args.length : 0;
    const float* x = static_cast<const float*>(args.x) + row * args.length;
    float v[kMost][kVectorSize];
    float sum = 0, squares = 0;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) { load_dense(x, at, v[i]); });
    if (args.residual != nullptr) add_residual<kTeam, kMost>(args, row, length, v);
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous&) {
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) sum += v[i][k];
    });
    const float mean = args.mean == nullptr ? 0 : join_row<RowSum, kTeam>(sum) / count;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous&) {
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        v[i][k] -= mean;
        squares += v[i][k] * v[i][k];
      }
    });
    const float rstd = rsqrt(join_row<RowSum, kTeam>(squares) / count + eps);
    if (length > 0 && threadIdx.x % kTeam == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      args.rstd[row] = rstd;
    }
    with_type<float, Kind::values>(args.y_dtype, [&](auto* type) {
      auto* y = static_cast<decltype(type)>(args.y) + row * args.length;
      each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
        float weight[kVectorSize], codes[kVectorSize];
        unsigned inside = 0;
        load_or(args.weight, at, 1, weight);
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) v[i][k] *= rstd;
        shift(args, at, v[i], weight, v[i]);
        with_divisor(grid.scale, v[i], [&](auto scale) {
#pragma unroll
          for (int k = 0; k < kVectorSize; ++k) {
            const auto point = F::apply(functor, v[i][k], scale, grid.zero_point);
            v[i][k] = point.value;
            codes[k] = point.code;
            inside |= point.inside << k;
          }
        });
        store_dense(y, at, true, v[i]);
        const Contiguous of_all = whole_at(row * args.length + at.first);
        if (args.codes != nullptr) store_codes(args.codes, args.packed, of_all, true, codes);
        if (args.mask != nullptr) args.mask[of_all.first / kVectorSize] = static_cast<uint8_t>(inside);
      });
    });
  }
}

// What blocks leave: sums for scale and zero point, and for each column of weight and bias.
struct RowsParts {
  double *scale, *zero_point;
  float* columns;  // 2 * length for each block

  __host__ __device__ RowsParts(double* workspace, int64_t blocks)
      : scale(workspace), zero_point(workspace + blocks), columns(reinterpret_cast<float*>(workspace + 2 * blocks)) {}
};

// A thread sums its columns over the rows of its team; then the teams of a block are joined, one after the other.
template <int kTeam, int kMost>
__global__ void __launch_bounds__(kThreads, kMost <= 2 ? 2 : 1)
    norm_rows_backward_kernel(const __grid_constant__ FunctionRows args, double* workspace) {
  using F = LearnedGradient<float, float>;
  constexpr int kRows = kThreads / kTeam;
  const auto functor = functor_of<F>(args);
  const RowsGrid grid(args);
  const float count = static_cast<float>(args.length);
  float dweight[kMost][kVectorSize] = {}, dbias[kMost][kVectorSize] = {};
  Pair total = {0, 0};
  for (int64_t first = int64_t{blockIdx.x} * kRows; first < args.rows; first += int64_t{gridDim.x} * kRows) {
    const int64_t row = first + threadIdx.x / kTeam, start = row * args.length;
    const int64_t length = row < args.rows ? args.length : 0;
    const float* x = static_cast<const float*>(args.x) + start;
    float* dx = static_cast<float*>(args.dx) + start;
    float v[kMost][kVectorSize], grad[kMost][kVectorSize];
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) { load_dense(x, at, v[i]); });
    with_type<float, Kind::values>(args.grad_dtype, [&](const auto* type) {
      each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
        load_dense(static_cast<decltype(type)>(args.grad) + start, at, grad[i]);
      });
    });
    const float mean = length > 0 && args.mean != nullptr ? args.mean[row] : 0, rstd = length > 0 ? args.rstd[row] : 0;
    float sum = 0, dot = 0, of_scale = 0, of_zero_point = 0;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
      float weight[kVectorSize];
      load_or(args.weight, at, 1, weight);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) v[i][k] = (v[i][k] - mean) * rstd;
      if (args.mask != nullptr) {
        const unsigned inside = args.mask[(start + at.first) / kVectorSize];
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) grad[i][k] = inside >> k & 1u ? grad[i][k] : 0.0f;
      } else {
        float z[kVectorSize];
        shift(args, at, v[i], weight, z);
        with_divisor(grid.scale, z, [&](auto scale) {
#pragma unroll
          for (int k = 0; k < kVectorSize; ++k) {
            const auto gradient = F::apply(functor, z[k], grad[i][k], scale, grid.zero_point);
            grad[i][k] = gradient.dx;
            of_scale += gradient.scale;
            of_zero_point += gradient.zero_point;
          }
        });
      }
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        dbias[i][k] += grad[i][k];
        dweight[i][k] += grad[i][k] * v[i][k];
        grad[i][k] *= weight[k];
        sum += grad[i][k];
        dot += grad[i][k] * v[i][k];
      }
    });
    sum = args.mean == nullptr ? 0 : join_row<RowSum, kTeam>(sum) / count;
    dot = join_row<RowSum, kTeam>(dot) / count;
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) {
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) v[i][k] = rstd * (grad[i][k] - sum - v[i][k] * dot);
    });
    join_sum<kTeam, kMost>(args, start, length, v);
    each_vector<kTeam, kMost>(length, [&](int i, const Contiguous& at) { store_dense(dx, at, true, v[i]); });
    total.first += of_scale;
    total.second += of_zero_point;
  }
  const RowsParts parts(workspace, gridDim.x);
  float* columns = parts.columns + 2 * args.length * blockIdx.x;
  __shared__ float joined[kRows == 1 ? 1 : 2 * kMost * kVectorSize * kTeam];
  float *of_weight = kRows == 1 ? columns : joined, *of_bias = of_weight + args.length;
#pragma unroll 1
  for (int team = 0; team < kRows; ++team) {
    if (threadIdx.x / kTeam == team) {
      each_vector<kTeam, kMost>(args.length, [&](int i, const Contiguous& at) {
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) {
          float &w = of_weight[at.first + k], &b = of_bias[at.first + k];
          w = team == 0 ? dweight[i][k] : w + dweight[i][k];
          b = team == 0 ? dbias[i][k] : b + dbias[i][k];
        }
      });
    }
    __syncthreads();
  }
  if constexpr (kRows > 1) {
    for (int64_t c = threadIdx.x; c < 2 * args.length; c += kThreads) columns[c] = joined[c];
  }
  const Pair pair = sum_of_block(total);
  if (threadIdx.x == 0) write({parts.scale, parts.zero_point}, blockIdx.x, pair);
}

// 32 columns for each block, of which 8 threads sum each; the last block joins the sums of the scale.
__global__ void __launch_bounds__(kThreads)
    norm_rows_join_kernel(const __grid_constant__ FunctionRows args, const __grid_constant__ UnitGradients unit,
                          const __grid_constant__ AllGradients before, double* workspace, int64_t blocks) {
  const RowsParts parts(workspace, blocks);
  __shared__ double sums[kThreads];
  if (blockIdx.x + 1 == gridDim.x) return join_sums(args.sums, parts.scale, parts.zero_point, blocks, unit, before);
  const int64_t width = 2 * args.length, column = int64_t{32} * blockIdx.x + threadIdx.x % 32;
  double sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int64_t b = threadIdx.x / 32; b < blocks; b += kThreads / 32) sum += parts.columns[b * width + column];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= 32 || column >= width) return;
  for (int part = 1; part < kThreads / 32; ++part) sum += sums[threadIdx.x + 32 * part];
  float* to = column < args.length ? args.dweight : args.dbias;
  if (to != nullptr) to[column < args.length ? column : column - args.length] = static_cast<float>(sum);
}

// ---- functions of an element

// Of torch's approximation of GELU.
QT_DEVICE float tanh_of(float x) { return ::tanhf(0.79788456080286535588f * (x + 0.044715f * (x * x * x))); }

// The formulas of torch's own kernels.
template <RowFunction kFunction>
struct ElementFunction {
  __device__ explicit ElementFunction(const FunctionRows& /*args*/) {}

  __device__ float value(float x) const {
    if constexpr (kFunction == RowFunction::none) return x;
    if constexpr (kFunction == RowFunction::silu) return x / (1 + ::expf(-x));
    if constexpr (kFunction == RowFunction::gelu_tanh) return 0.5f * x * (1 + tanh_of(x));
    return x * 0.5f * (1 + ::erff(x * 0.70710678118654752440f));
  }

  __device__ float derivative(float x) const {
    if constexpr (kFunction == RowFunction::none) {
      return 1;
    } else if constexpr (kFunction == RowFunction::silu) {
      const float sigmoid = 1 / (1 + ::expf(-x));
      return sigmoid * (1 + x * (1 - sigmoid));
    } else if constexpr (kFunction == RowFunction::gelu_tanh) {
      const float tanh = tanh_of(x), slope = 0.79788456080286535588f * (1 + 3 * 0.044715f * (x * x));
      return 0.5f * (1 + tanh) + 0.5f * x * ((1 - tanh * tanh) * slope);
    } else {
      const float density = ::expf(-0.5f * x * x) * 0.39894228040143267794f;
      return 0.5f * (1 + ::erff(x * 0.70710678118654752440f)) + x * density;
    }
  }
};

template <>
struct ElementFunction<RowFunction::heads> {
  float factor;
  __device__ explicit ElementFunction(const FunctionRows& args) : factor(static_cast<float>(args.eps)) {}
  __device__ float value(float x) const { return x * factor; }
  __device__ float derivative(float /*x*/) const { return factor; }
};

// The value is rounded to the type of x, as torch's op returns it.
template <class T, class F>
QT_DEVICE void values_of(const F& function, const float (&x)[kVectorSize], float (&z)[kVectorSize]) {
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) z[k] = to_arithmetic<float>(from_arithmetic<T>(function.value(x[k])));
}

// Takes the vectors of contiguous heads to those of a view of them.
struct HeadVectors {
  IndexDivisor features, places, heads;

  explicit HeadVectors(const FunctionRows& args)
      : features(args.features / kVectorSize), places(args.places), heads(args.heads) {}

  __device__ Contiguous in_view(const HeadStrides& strides, const Contiguous& at) const {
    const auto vector = static_cast<uint32_t>(at.first / kVectorSize);
    const uint32_t row = vector / features, head = row / places, batch = head / heads;
    const int64_t first = batch * strides.batch + head % heads * strides.head + row % places * strides.place;
    return whole_at(first + int64_t{kVectorSize} * (vector % features));
  }
};

template <RowFunction kFunction>
QT_DEVICE Contiguous in_view(const HeadVectors& vectors, const HeadStrides& strides, const Contiguous& at) {
  if constexpr (kFunction == RowFunction::heads) return vectors.in_view(strides, at);
  return at;
}

template <RowFunction kFunction>
__global__ void __launch_bounds__(kThreads, 3)
    function_kernel(const __grid_constant__ FunctionRows args, const __grid_constant__ HeadVectors vectors) {
  using F = IntegerFunctor<float, float>;
  const auto functor = functor_of<F>(args);
  const RowsGrid grid(args);
  const ElementFunction<kFunction> function(args);
  with_type<float, Kind::values>(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_vectors(args.length, [&](const Contiguous& at) {
      float v[kVectorSize], codes[kVectorSize];
      unsigned inside = 0;
      load_dense(static_cast<const T*>(args.x), in_view<kFunction>(vectors, args.x_strides, at), v);
      values_of<T>(function, v, v);
      with_divisor(grid.scale, v, [&](auto scale) {
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) {
          const auto point = F::apply(functor, v[k], scale, grid.zero_point);
          v[k] = point.value;
          codes[k] = point.code;
          inside |= point.inside << k;
        }
      });
      store_dense(static_cast<T*>(args.y), at, true, v);
      if (args.codes != nullptr) store_codes(args.codes, args.packed, at, true, codes);
      if (args.mask == nullptr) return;
      args.mask[at.first / kVectorSize] = static_cast<uint8_t>(at.is_whole ? inside : inside & ((1u << at.n) - 1));
    });
  });
}

template <RowFunction kFunction>
__global__ void __launch_bounds__(kThreads, kFunction == RowFunction::gelu_tanh ? 2 : 3)
    function_backward_kernel(const __grid_constant__ FunctionRows args, const __grid_constant__ HeadVectors vectors,
                             double* parts) {
  using F = LearnedGradient<float, float>;
  const ElementFunction<kFunction> function(args);
  const auto functor = functor_of<F>(args);
  const RowsGrid grid(args);
  Pair total = {0, 0};
  with_type<float, Kind::values>(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_vectors(args.length, [&](const Contiguous& at) {
      float x[kVectorSize], grad[kVectorSize];
      load_dense(static_cast<const T*>(args.x), in_view<kFunction>(vectors, args.x_strides, at), x);
      load_dense(static_cast<const T*>(args.grad), at, grad);
      if (args.mask != nullptr) {
        const unsigned inside = args.mask[at.first / kVectorSize];
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) grad[k] = inside >> k & 1u ? grad[k] : 0.0f;
      } else {
        float z[kVectorSize], of_scale = 0, of_zero_point = 0;
        values_of<T>(function, x, z);
        with_divisor(grid.scale, z, [&](auto scale) {
#pragma unroll
          for (int k = 0; k < kVectorSize; ++k) {  // an element that there is not has no gradient
            const auto gradient = F::apply(functor, z[k], grad[k], scale, grid.zero_point);
            grad[k] = gradient.dx;
            of_scale += gradient.scale;
            of_zero_point += gradient.zero_point;
          }
        });
        total.first += of_scale;
        total.second += of_zero_point;
      }
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) grad[k] *= function.derivative(x[k]);
      store_dense(static_cast<T*>(args.dx), in_view<kFunction>(vectors, args.dx_strides, at), true, grad);
    });
  });
  const Pair pair = sum_of_block(total);
  if (threadIdx.x == 0) write({parts, parts + gridDim.x}, blockIdx.x, pair);
}

__global__ void __launch_bounds__(kThreads)
    function_join_kernel(const __grid_constant__ FunctionRows args, const __grid_constant__ UnitGradients unit,
                         const __grid_constant__ AllGradients before, const double* parts, int64_t blocks) {
  join_sums(args.sums, parts, parts + blocks, blocks, unit, before);
}

// ---- launches

constexpr int64_t kTeamRows = 4 * 32 * kVectorSize;  // the longest rows of a warp

// Of backward, a function of the shape alone: every GPU sums in the same order.
int64_t function_blocks(const FunctionRows& args) {
  if (args.function != RowFunction::norm) return blocks_for_vectors(args.length);
  constexpr int64_t kMostBlocks = 528;  // whole waves of one and of two blocks on 132 multiprocessors
  return least(divide_up(args.rows, args.length <= kTeamRows ? kThreads / 32 : 1), kMostBlocks);
}

template <int kTeam, int kMost>
void launch_norm_rows(const FunctionRows& args, double* workspace, cudaStream_t stream) {
  if (args.is_backward()) {
    const auto kernel = norm_rows_backward_kernel<kTeam, kMost>;
    kernel<<<static_cast<unsigned>(function_blocks(args)), kThreads, 0, stream>>>(args, workspace);
    return;
  }
  constexpr int64_t kMostBlocks = 1 << 14;
  const auto kernel = norm_rows_kernel<kTeam, kMost>;
  const int64_t blocks = least(divide_up(args.rows, kThreads / kTeam), kMostBlocks);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
}

void norm_rows(const FunctionRows& args, const UnitGradients& unit, const AllGradients& before, double* workspace,
               cudaStream_t stream) {
  const int64_t vectors = args.length / kVectorSize;
  if (vectors <= 32) {
    launch_norm_rows<32, 1>(args, workspace, stream);
  } else if (vectors <= 64) {
    launch_norm_rows<32, 2>(args, workspace, stream);
  } else if (vectors <= 96) {
    launch_norm_rows<32, 3>(args, workspace, stream);
  } else if (vectors <= 128) {
    launch_norm_rows<32, 4>(args, workspace, stream);
  } else if (vectors <= 2 * kThreads) {
    launch_norm_rows<kThreads, 2>(args, workspace, stream);
  } else {
    launch_norm_rows<kThreads, 4>(args, workspace, stream);
  }
  if (!args.is_backward()) return;
  const int64_t blocks = function_blocks(args), of_columns = divide_up(2 * args.length, 32);
  const auto join = static_cast<unsigned>(of_columns + 1);
  norm_rows_join_kernel<<<join, kThreads, 0, stream>>>(args, unit, before, workspace, blocks);
}

template <RowFunction kFunction>
void elements(const FunctionRows& args, const UnitGradients& unit, const AllGradients& before, double* parts,
              cudaStream_t stream) {
  const int64_t blocks = function_blocks(args);
  const HeadVectors vectors(args);
  if (!args.is_backward()) {
    const auto kernel = function_kernel<kFunction>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, vectors);
    return;
  }
  const auto kernel = function_backward_kernel<kFunction>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, vectors, parts);
  if (args.sums == nullptr) return;
  function_join_kernel<<<1, kThreads, 0, stream>>>(args, unit, before, parts, blocks);
}

}  // namespace

int64_t function_rows_workspace(const FunctionRows& args) {
  if (!args.is_backward()) return 0;
  return function_blocks(args) * (args.function == RowFunction::norm ? 2 + args.length : 2);
}

void function_rows(const FunctionRows& args, const UnitGradients& unit, const AllGradients& before, double* workspace,
                   cudaStream_t stream) {
  switch (args.function) {
    case RowFunction::norm: return norm_rows(args, unit, before, workspace, stream);
    case RowFunction::none: return elements<RowFunction::none>(args, unit, before, workspace, stream);
    case RowFunction::heads: return elements<RowFunction::heads>(args, unit, before, workspace, stream);
    case RowFunction::gelu: return elements<RowFunction::gelu>(args, unit, before, workspace, stream);
    case RowFunction::gelu_tanh: return elements<RowFunction::gelu_tanh>(args, unit, before, workspace, stream);
    case RowFunction::silu: return elements<RowFunction::silu>(args, unit, before, workspace, stream);
  }
}

}  // namespace cuda
}  // namespace qtoolkit
