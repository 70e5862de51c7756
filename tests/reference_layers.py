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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step(x, state, w_ih, w_hh, b_ih, b_hh, round_h=lambda h: h, project=lambda h: h):
    """One step by the formulas of torch.nn.LSTM: (h, c) from the rows x; `round_h` is what the product takes of h."""
    h, c = state
    i, f, g, o = np.split(x @ w_ih.T + b_ih + round_h(h) @ w_hh.T + b_hh, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return project(sigmoid(o) * np.tanh(c)), c


def gru_step(x, state, w_ih, w_hh, b_ih, b_hh, round_h=lambda h: h):
    """One step by the formulas of torch.nn.GRU; the rounded state is what the next one is blended from."""
    h = round_h(state[0])
    r_x, z_x, n_x = np.split(x @ w_ih.T + b_ih, 3, -1)
    r_h, z_h, n_h = np.split(h @ w_hh.T + b_hh, 3, -1)
    r, z = sigmoid(r_x + r_h), sigmoid(z_x + z_h)
    n = np.tanh(n_x + r * n_h)
    return ((1 - z) * n + z * h,)


def recurrent(step, x, state, reverse=False):
    """The outputs (steps, features) and the last state of one sequence (steps, features), from its end where reversed."""
    outputs = []
    for row in x[::-1] if reverse else x:
        state = step(row, state)
        outputs.append(state[0])
    return np.stack(outputs[::-1] if reverse else outputs), state
