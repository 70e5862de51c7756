"""Write a transposed convolution as a convolution with one channel per pixel of a block, and a pixel shuffle."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SubPixel:
    """One dimension of a transposed convolution with stride s, as a convolution of stride 1 with s times the channels.

    Output s * m + r is channel r at position m: the sum over taps of x[m + tap - before] times the weight at s * (taps - 1 -
    tap) + r of the weight with `front` and `back` zeros around it.
    """

    front: int  # zeros in front of the weight
    back: int  # zeros behind it
    taps: int  # the size of the convolution
    before: int  # its padding in front of the input
    after: int  # its padding behind it
    over: int  # outputs of the last block that the transposed convolution does not have


def sub_pixel(size: int, stride: int, padding: Sequence[int], output_padding: int) -> SubPixel:
    """Return the form of one dimension of a weight with `size` taps, without dilation.

    `padding` is removed at the front and at the back, `output_padding` is added at the back.

    Example:
        >>> sub_pixel(4, 2, (1, 1), 0)
        SubPixel(front=1, back=1, taps=3, before=1, after=1, over=0)
        >>> sub_pixel(3, 2, (0, 0), 0)
        SubPixel(front=0, back=1, taps=2, before=1, after=1, over=1)
    """
    front_cut, back_cut = padding
    longer = size + output_padding - stride - front_cut - back_cut  # than the input times the stride
    blocks = -(-longer // stride)
    # With zeros around the weight if the padding cuts off inputs.
    first = min(-((stride - 1 + front_cut) // stride), blocks)
    last = max((size - 1 - front_cut) // stride, 0)
    taps = last - first + 1
    front = -stride * first - front_cut
    return SubPixel(front, stride * taps - size - front, taps, last, blocks - first, blocks * stride - longer)


def sub_pixels_of_image(
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[SubPixel, ...] | None:
    """Return the form of both dimensions of a transposed convolution of images; None if there is none.

    There is none for dilation, for one or three dimensions, and for two different strides. Both file export and integer
    arithmetic use this function, so they agree on the layers.

    Example:
        >>> len(sub_pixels_of_image((4, 4), (2, 2), ((1, 1), (1, 1)), (0, 0), (1, 1)))
        2
        >>> sub_pixels_of_image((4, 4), (2, 1), ((1, 1), (1, 1)), (0, 0), (1, 1)) is None
        True
    """
    if len(sizes) != 2 or len(set(strides)) > 1 or set(dilation) != {1}:
        return None
    return tuple(sub_pixel(*dimension) for dimension in zip(sizes, strides, padding, output_padding, strict=True))
