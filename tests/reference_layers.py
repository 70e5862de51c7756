"""The oracle of layers: transposed convolution and batch norm written out plainly in NumPy, in float64."""

import numpy as np


def conv_transpose(x, weight, bias, stride, padding, output_padding, dilation, groups):
    """Each input value adds the kernel, times itself, at its place; any number of dimensions, given as tuples."""
    kernel, sizes = np.array(weight.shape[2:]), np.array(x.shape[2:])
    stride, padding, output_padding, dilation = map(np.array, (stride, padding, output_padding, dilation))
    x = x.reshape(x.shape[0], groups, -1, *sizes)
    weight = weight.reshape(groups, -1, *weight.shape[1:])
    full = (sizes - 1) * stride + dilation * (kernel - 1) + 1 + output_padding
    y = np.zeros((x.shape[0], groups, weight.shape[2], *full))
    for tap in np.ndindex(*kernel):
        first = tap * dilation
        places = tuple(map(slice, first, first + stride * (sizes - 1) + 1, stride))
        y[(..., *places)] += np.einsum("ngi...,gio->ngo...", x, weight[(..., *tap)])
    y = y.reshape(x.shape[0], -1, *full)[(..., *map(slice, padding, full - padding))]
    return y if bias is None else y + along(bias, y)


def along(values, y):
    """One value per channel, to broadcast over y, whose channels are dimension 1."""
    return values.reshape(1, -1, *[1] * (y.ndim - 2))


def batch_norm(y, mean, variance, gamma, beta, eps):
    return (y - along(mean, y)) / np.sqrt(along(variance, y) + eps) * along(gamma, y) + along(beta, y)


def statistics(y):
    """Mean and (biased) variance of each channel."""
    others = tuple(d for d in range(y.ndim) if d != 1)
    return y.mean(others), y.var(others)


def scale_output_channels(weight, factor, groups):
    """The weight of a transposed convolution, each output channel of each group times its factor."""
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    return (grouped * factor.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)
