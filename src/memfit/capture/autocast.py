"""Autocast on meta tensors: torch's own casts apply only to tensors that are really on the device.

The lists are those of ATen/autocast_mode.h (CUDA) and ATen/autocast_mode.cpp (CPU); a test compares them with what the
dispatcher has registered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from memfit.torch_private.autograd import is_view


class Cast(enum.Enum):
    """What autocast does to an op's arguments."""

    LOW = "to the autocast dtype"
    FULL = "to float32"
    FULL_RESULT = "dtype=float32 is passed, unless the caller gave a dtype"
    WIDEST = "to the widest dtype among the arguments"
    FULL_NORM = "norm's float32 result"


_LOW_CUDA = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose"""
_FULL_CUDA = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""
_FULL_RESULT_CUDA = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
_WIDEST_CUDA = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

_LOW_CPU = """conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm linear _convolution
matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention
_native_multi_head_attention"""
_FULL_CPU = """avg_pool3d binary_cross_entropy grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback
grid_sampler_3d polar prod quantile nanquantile stft cdist trace view_as_complex cholesky
cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d
max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div multilabel_margin_loss
binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft
fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_matrix_rank
linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv
linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf
_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh
linalg_lstsq linalg_inv_ex"""
_WIDEST_CPU = "stack cat index_copy"

# Functions of the Python bindings that reach a listed op only inside C++.
_INNER = {"nll_loss_nd": "nll_loss", "__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow"}


def policies(device_type: str) -> dict[str, Cast]:
    """Return the cast policy of each op by name, for a device type."""
    if device_type == "cpu":
        named = ((_LOW_CPU, Cast.LOW), (_FULL_CPU, Cast.FULL), (_WIDEST_CPU, Cast.WIDEST))
    else:
        named = (
            (_LOW_CUDA, Cast.LOW),
            (_FULL_CUDA, Cast.FULL),
            (_FULL_RESULT_CUDA, Cast.FULL_RESULT),
            (_WIDEST_CUDA, Cast.WIDEST),
            ("norm", Cast.FULL_NORM),
        )
    return {name: cast for names, cast in named for name in names.split()}


class Autocast:
    """Applies autocast's policy to a call, with its cache of cast weights."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._policies = policies(device_type)
        for name, listed in _INNER.items():
            if listed in self._policies:
                self._policies[name] = self._policies[listed]
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Drop the cast weights, as leaving the outermost autocast region does."""
        self._cache.clear()

    def apply(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return the arguments as autocast would pass them on; None when the op is on no list."""
        policy = self._policies.get(func.__name__)
        if policy is None:
            return None
        if policy is Cast.LOW:
            low = torch.get_autocast_dtype(self.device_type)
            return self._cast(args, low), self._cast(kwargs, low)
        if policy is Cast.FULL:
            return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        if policy is Cast.WIDEST:
            widest = self._widest((args, kwargs))
            return self._cast(args, widest), self._cast(kwargs, widest)
        takes_dtype = kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args)
        eligible = bool(args) and isinstance(args[0], torch.Tensor) and _eligible(args[0])
        if takes_dtype and eligible and (policy is Cast.FULL_RESULT or args[0].dtype != torch.float32):
            return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cached(value, dtype)
        if isinstance(value, (list, tuple)):  # C++ evaluates the casts of an argument list from the last to the first
            return type(value)(reversed([self._cast(item, dtype) for item in reversed(value)]))
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        return value

    def _cached(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype == dtype:
            return tensor
        cacheable = (
            dtype == torch.get_autocast_dtype(self.device_type)
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not is_view(tensor)
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return tensor.to(dtype)
        entry = self._cache.get(id(tensor))
        if entry is None:
            entry = self._cache[id(tensor)] = (tensor, tensor.to(dtype))
        return entry[1]

    def _widest(self, value: Any) -> torch.dtype:
        low = torch.get_autocast_dtype(self.device_type)
        found: list[torch.dtype] = []

        def look(item: Any) -> None:
            if isinstance(item, torch.Tensor) and _eligible(item):
                found.append(item.dtype)
            elif isinstance(item, (list, tuple)):
                for each in item:
                    look(each)
            elif isinstance(item, dict):
                look(list(item.values()))

        look(value)
        return torch.float32 if torch.float32 in found else low


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
