"""Patches: a convolution whose stride is its size, as one product."""

import pytest
import torch

from redivider.models.patches import Patches
from redivider.models.vit import Options


@pytest.fixture
def patches():
    options = Options(image_size=12, patch_size=4, in_channels=3, width=10, depth=1, heads=2)
    return Patches(options).double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patches_are_a_convolution(patches, layout):
    x = torch.randn(5, 3, 12, 12).double().to(memory_format=layout).requires_grad_()
    weights = torch.randn(5, 9, 10).double()
    results = []
    for tokens in (patches(x), patches.conv(x).flatten(2).transpose(1, 2)):
        wanted = [x, patches.conv.weight, patches.conv.bias]
        results.append((tokens, *torch.autograd.grad((tokens * weights).sum(), wanted)))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert results[0][0].is_contiguous()
    assert torch.autograd.gradcheck(patches, (x[:1].detach().requires_grad_(),))


def test_patches_under_autocast_have_float_gradients(patches):
    patches = patches.float()
    x = torch.randn(5, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        y = patches(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and patches.conv.weight.grad.dtype == torch.float32
    whole = x.unflatten(3, (3, 4)).unflatten(2, (3, 4)).sum((0, 2, 4))
    assert torch.allclose(patches.conv.weight.grad[0], whole, rtol=2e-2, atol=0.2)


def test_patches_work_under_function_transforms(patches):
    x = torch.randn(5, 3, 12, 12).double()
    weights = {name: param.detach() for name, param in patches.named_parameters()}

    def loss(weights, image):
        return torch.func.functional_call(patches, weights, (image[None],)).square().sum()

    per_image = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for number in range(5):
        patches.zero_grad()
        patches(x[number : number + 1]).square().sum().backward()
        for name, parameter in patches.named_parameters():
            assert torch.allclose(per_image[name][number], parameter.grad, rtol=1e-12)


def test_images_of_other_sizes_or_channels_are_refused(patches):
    for shape in ((2, 1, 12, 12), (2, 3, 12, 8), (3, 12, 12)):
        with pytest.raises(ValueError, match="batches of images of 3 x 12 x 12"):
            patches(torch.zeros(shape).double())


def test_patches_save_no_copy_of_the_image(patches):
    x = torch.randn(8, 3, 12, 12).double()
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patches(x)
    own = {x.untyped_storage().data_ptr(), patches.conv.weight.untyped_storage().data_ptr()}
    assert set(saved) <= own
