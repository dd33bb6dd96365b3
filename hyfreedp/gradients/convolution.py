"""Rule for convolutions: the weight's gradient is the sum over output positions of g times a patch of the input."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from hyfreedp.gradients.mapped import Pass, rule
from hyfreedp.gradients.per_sample import Instantiated, OuterProducts, keeps_factors, sum_to
from hyfreedp.gradients.rules import NN, samples_if_trained
from hyfreedp.pytorch.devices import exact_convolutions

Each = tuple[int, ...]  # one number per spatial dimension
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@rule(torch.conv1d, torch.conv2d, torch.conv3d, *_TRANSPOSED)
def _convolution(
    one_pass: Pass, func: Any, input: Tensor, weight: Any, bias: Any = None, *args: Any, **named: Any
) -> Any:
    """A convolution, or a transposed one, for which input and output gradient g exchange their roles.

    Inputs are (B, R, C, ...), where each of the B samples is a batch of R images.
    """
    x, dims, transposed = samples_if_trained(one_pass, input, weight, bias), weight.dim() - 2, func in _TRANSPOSED
    if x is None or x.dim() != weight.dim() + 1:  # an unbatched image
        return NotImplemented
    names = "stride padding output_padding groups dilation" if transposed else "stride padding dilation groups"
    sizes = dict(zip(names.split(), args, strict=False)) | named
    groups, padding = sizes.get("groups", 1), sizes.get("padding", 0)
    stride, dilation = (_each(sizes.get(name, 1), dims) for name in ("stride", "dilation"))
    if padding == "same":  # the larger half of an odd total is at the end
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        x = NN.pad(x, [side for total in reversed(totals) for side in (total // 2, total - total // 2)])
    padding = _each(0 if isinstance(padding, str) else padding, dims)
    output_padding = _each(sizes.get("output_padding", 0), dims)
    if any(extra >= step for extra, step in zip(output_padding, stride, strict=True)):
        return NotImplemented  # some output positions are reached by no input
    geometry = (stride, padding, dilation, groups)
    arguments = (stride, padding, output_padding, groups, dilation) if transposed else geometry
    rows = x.shape[:2]

    def call(x: Tensor) -> Tensor:
        return func(x.flatten(0, 1), weight, bias, *arguments).unflatten(0, rows)

    def backward(x: Tensor | None, g: Tensor, wanted: bool) -> Tensor | None:
        if one_pass.is_trained(bias):
            one_pass.add(bias, Instantiated(sum_to(g, 2)))
        if x is not None:
            small, large = (x.to(g.dtype), g) if transposed else (g, x.to(g.dtype))
            one_pass.add(weight, _weight_gradients(large, small, weight.shape, *geometry))
        if not wanted:
            return None
        how = (stride, padding, dilation, transposed, output_padding, groups, (True, False, False))
        input = g.new_empty(1).expand(shape)  # only its shape is used
        gradient = torch.ops.aten.convolution_backward(g.flatten(0, 1), input, weight.to(g.dtype), None, *how)[0]
        return gradient.unflatten(0, rows)

    shape = x.flatten(0, 1).shape
    return one_pass.layer(call, backward, x, keeps_input=one_pass.is_trained(weight))


def _weight_gradients(
    x: Tensor, g: Tensor, shape: torch.Size, stride: Each, padding: Each, dilation: Each, groups: int
) -> OuterProducts | Instantiated:
    """Gradients of a weight of ``shape`` (P, C / groups, ...), from inputs x (B, R, C, ...) and g (B, R, P, ...)."""
    kernel, n = tuple(shape[2:]), len(shape) - 2

    def patches(x: Tensor) -> Tensor:
        """The patch of the input at each of T output positions, (B, R T, C * kernel)."""
        x = NN.pad(x, [side for each in reversed(padding) for side in (each, each)])
        for i in range(n):  # dimension 3 + i becomes the positions of a window, which is a new last dimension
            x = x.unfold(3 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
        positions, windows = range(3, 3 + n), range(3 + n, 3 + 2 * n)
        x = x.permute(0, 1, 2, *windows, *positions)
        x = x.flatten(3 + n).flatten(2, 2 + n)  # (B, R, C * kernel, T)
        return x.mT.flatten(1, 2)

    tokens = g.shape[1] * g.shape[3:].numel()
    if groups == 1 and keeps_factors(tokens, shape[0], shape[1:].numel()):
        return OuterProducts(g.flatten(3).mT.flatten(1, 2), x, patches)
    # One convolution over the channels of all samples side by side, in which each sample is a group.
    weight_gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[n - 1]
    x, g, samples = x.transpose(0, 1).flatten(1, 2), g.transpose(0, 1).flatten(1, 2), len(x)
    with exact_convolutions():  # as the norms are
        joined = weight_gradient(x, (g.shape[1], *shape[1:]), g, stride, padding, dilation, samples * groups)
    return Instantiated(joined.unflatten(0, (samples, -1)))


def _each(value: Any, dimensions: int) -> Each:
    """A number, or one for each dimension, as a tuple with one for each dimension."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return numbers if len(numbers) == dimensions else numbers * dimensions
