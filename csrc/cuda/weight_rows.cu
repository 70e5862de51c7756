// Fake quantization of a weight whose output channels are rows in memory, and its gradients, on CUDA: one kernel each.
#include "../fake_quant.h"
#include "../layer/weight_rows.h"
#include "gradients.cuh"
#include "index_divisor.h"
#include "kernels.h"
#include "loops.cuh"
#include "unit_scales.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// What positions are divided by: the length of a row, and both sides of it as a matrix.
template <class I>
struct RowPlaces {
  DivisorOfIndex<I> length, major, minor;

  explicit RowPlaces(const WeightRows& args) : length(args.length()), major(args.major), minor(args.minor) {}
};

// The place in a matrix of an element of the transposed one, which has `columns` columns.
template <class I>
QT_DEVICE I turned(I at, const DivisorOfIndex<I>& columns, int64_t rows) {
  const I row = at / columns;
  return (at - row * static_cast<I>(columns.number)) * static_cast<I>(rows) + row;
}

template <class A>
struct WeightRow {
  A factor;
  DivisorOf<A> scale;
};

template <class A>
QT_DEVICE WeightRow<A> row_at(const WeightRows& args, int64_t row) {
  const A* factor = static_cast<const A*>(args.factor);
  return {factor == nullptr ? A(1) : __ldg(factor + row),
          DivisorOf<A>(usable_scale(__ldg(static_cast<const A*>(args.scale) + row * args.scale_step)))};
}

// The same, from what the scale and the factor are made of.
template <class A>
QT_DEVICE WeightRow<A> row_of_unit(const UnitScales& u, int64_t row) {
  return {weight_factor<A>(u, row),
          DivisorOf<A>(usable_scale(trained_scale_at<A>(u.weight, u.weight.count == 1 ? 0 : row)))};
}

template <class A, class I, class RowAt>
QT_DEVICE void weight_values(const WeightRows& args, const RowPlaces<I>& places, const RowAt& row_at) {
  const A lo = static_cast<A>(args.bounds.lo), hi = static_cast<A>(args.bounds.hi);
  const A* weight = static_cast<const A*>(args.weight);
  const int64_t numel = args.rows * args.length();
  const bool shared = args.length() % kVectorSize == 0;  // a vector has elements of one row
  for_vectors(numel, [&](const Contiguous& at) {
    A v[kVectorSize];
    if (shared && !args.other_format) {
      load_dense(weight, at, v);
      const WeightRow<A> row = row_at(static_cast<I>(at.first) / places.length);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) v[k] = v[k] * row.factor;
      with_divisor(row.scale, v, [&](auto scale) {
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) v[k] = value_of<A>(snap(v[k], scale, A(0), lo, hi).code, scale, A(0));
      });
    } else {
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        if (k >= at.n) break;
        const I i = static_cast<I>(at.first + k), row = i / places.length;
        const I first = row * static_cast<I>(args.length()), within = i - first;
        const WeightRow<A> of = row_at(row);
        const I from = args.other_format ? turned<I>(within, places.major, args.minor) : within;
        const A scale = of.scale, product = weight[first + from] * of.factor;
        v[k] = value_of(snap(product, scale, A(0), lo, hi).code, scale, A(0));
      }
    }
    with_type<A, Kind::values>(args.y_dtype,
                               [&](auto* type) { store_dense(static_cast<decltype(type)>(args.y), at, v); });
  });
}

template <class A, class I>
__global__ void __launch_bounds__(kThreads)
    weight_values_kernel(const __grid_constant__ WeightRows args, const __grid_constant__ RowPlaces<I> places) {
  weight_values<A>(args, places, [&](int64_t row) { return row_at<A>(args, row); });
}

// With the small tensors of the weight's unit, which no other block waits for.
template <class A, class I>
__global__ void __launch_bounds__(kThreads)
    unit_weight_kernel(const __grid_constant__ WeightRows args, const __grid_constant__ RowPlaces<I> places,
                       const __grid_constant__ UnitScales u) {
  const int64_t threads = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < largest_count(u); i += threads) {
    small_tensors_at<A>(u, i);
  }
  weight_values<A>(args, places, [&](int64_t row) { return row_of_unit<A>(u, row); });
}

// A block has a row, and the gradients at its place, which are computed from its sums.
template <class A, class I>
__global__ void __launch_bounds__(kThreads)
    weight_gradients_kernel(const __grid_constant__ WeightRows args, const __grid_constant__ RowPlaces<I> places,
                            const __grid_constant__ UnitGradients unit, const __grid_constant__ AllGradients before) {
  const int64_t first = blockIdx.x * args.length();
  const A lo = static_cast<A>(args.bounds.lo), hi = static_cast<A>(args.bounds.hi);
  const A* weight = static_cast<const A*>(args.weight) + first;
  A* dweight = static_cast<A*>(args.dweight) + first;
  const WeightRow<A> row = row_at<A>(args, blockIdx.x);
  Pair sum = {0, 0};
  with_type<A, Kind::values>(args.grad_dtype, [&](const auto* type) {
    const auto* grad = static_cast<decltype(type)>(args.grad) + first;
    for (int64_t i = int64_t{threadIdx.x} * kVectorSize; i < args.length(); i += kThreads * kVectorSize) {
      const Contiguous at = vector_at(i, args.length());
      A w[kVectorSize], product[kVectorSize], g[kVectorSize];
      TreeSum<A> of_scale, of_factor;
      load_dense(weight, at, w);
      if (args.other_format) {
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) {
          g[k] = k < at.n ? to_arithmetic<A>(grad[turned<I>(static_cast<I>(i + k), places.minor, args.major)]) : A(0);
        }
      } else {
        load_dense(grad, at, g);
      }
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) product[k] = w[k] * row.factor;
      with_divisor(row.scale, product, [&](auto scale) {
#pragma unroll
        for (int j = 0; j < kVectorSize; ++j) {
          const int k = TreeSum<A>::place(j);
          const auto point = snap(product[k], scale, A(0), lo, hi);
          const A passed = is_inside(point) ? g[k] : A(0);
          of_scale.add(j, scale_gradient(point, g[k], A(0)));
          of_factor.add(j, passed * w[k]);
          g[k] = passed * row.factor;
        }
      });
      store_dense(dweight, at, g);
      sum.first += of_scale.total();
      sum.second += of_factor.total();
    }
  });
  const Pair total = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  args.sum_scale[blockIdx.x] = total.first;
  args.sum_factor[blockIdx.x] = total.second;
  write_gradients(before, blockIdx.x);
  unit_gradients_at<A>(unit, blockIdx.x);
}

template <class I>
void values(const WeightRows& args, const UnitScales* unit, cudaStream_t stream) {
  const unsigned blocks = blocks_for_vectors(args.rows * args.length());
  const RowPlaces<I> places(args);
  if (unit == nullptr) {
    const auto kernel = args.f64 ? weight_values_kernel<double, I> : weight_values_kernel<float, I>;
    kernel<<<blocks, kThreads, 0, stream>>>(args, places);
  } else {
    const auto kernel = args.f64 ? unit_weight_kernel<double, I> : unit_weight_kernel<float, I>;
    kernel<<<blocks, kThreads, 0, stream>>>(args, places, *unit);
  }
}

template <class I>
void gradients(const WeightRows& args, const UnitGradients& unit, const AllGradients& before, cudaStream_t stream) {
  const auto kernel = args.f64 ? weight_gradients_kernel<double, I> : weight_gradients_kernel<float, I>;
  kernel<<<static_cast<unsigned>(args.rows), kThreads, 0, stream>>>(args, RowPlaces<I>(args), unit, before);
}

}  // namespace

void weight_forward(const WeightRows& args, const UnitScales* unit, cudaStream_t stream) {
  with_index(args.rows * args.length(), [&](auto index) { values<decltype(index)>(args, unit, stream); });
}

void weight_backward(const WeightRows& args, const UnitGradients& unit, const AllGradients& before,
                     cudaStream_t stream) {
  with_index(args.rows * args.length(), [&](auto index) { gradients<decltype(index)>(args, unit, before, stream); });
}

}  // namespace cuda
}  // namespace qtoolkit
