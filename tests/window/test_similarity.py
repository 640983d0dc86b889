import pytest
import torch

from cast_rl.window.similarity import low_pass, structural_similarity


def test_equal_images_are_fully_alike_and_inverted_ones_are_not():
    images = torch.rand(3, 3, 16, 20)
    torch.testing.assert_close(structural_similarity(images, images), torch.ones(3).double())
    assert (structural_similarity(images, 1 - images) < 0).all()
    other = torch.rand(3, 3, 16, 20)
    torch.testing.assert_close(structural_similarity(images, other), structural_similarity(other, images))


def test_one_window_is_the_formula():
    a, b = torch.rand(2, 1, 1, 7, 7, dtype=torch.float64)
    mean_a, mean_b = a.mean(), b.mean()
    covariance = ((a - mean_a) * (b - mean_b)).mean()
    expected = (2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)
    expected /= (mean_a**2 + mean_b**2 + 1e-4) * (a.var(correction=0) + b.var(correction=0) + 9e-4)
    assert structural_similarity(a, b).item() == pytest.approx(expected.item())


def test_fine_detail_does_not_count():
    image = torch.rand(1, 3, 16, 24).repeat_interleave(4, -1).repeat_interleave(4, -2)
    fine = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(32, 48) * 0.2
    assert low_pass(image).shape == (1, 3, 16, 24)
    torch.testing.assert_close(low_pass(image + fine), low_pass(image), rtol=0, atol=1e-6)
