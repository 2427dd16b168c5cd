"""Dropout, softmax, losses, indexing, recurrent layers, mixtures of experts and optimizers on CUDA targets.

Sources are files of torch 2.13 under aten/src/ATen/native unless said otherwise.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture.capture import trace
from memfit.capture.rules.products import blas_copy
from memfit.capture.step import Step, spec
from memfit.capture.trace_types import Category
from tests.capture.cuda_helpers import H100, captured, made_bytes, names, only

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# -- dropout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [  # Dropout.cpp, is_fused_kernel_acceptable: 0 < p < 1 in training, out of place
        pytest.param(lambda x: F.dropout(x, 0.1), ["native_dropout"], id="fused"),
        pytest.param(lambda x: F.dropout(x, 0.0) * 2, ["mul.Tensor"], id="nothing-dropped"),
        pytest.param(lambda x: F.dropout(x, 0.5, training=False) * 2, ["mul.Tensor"], id="evaluation"),
        pytest.param(
            lambda x: F.dropout(x * 2, 0.1, inplace=True),
            ["mul.Tensor", "empty_like", "bernoulli_.float", "div_.Scalar", "mul_.Tensor"],
            id="in-place-is-composed",
        ),
        pytest.param(
            lambda x: F.dropout2d(x, 0.1),
            ["new_empty", "bernoulli_.float", "div_.Scalar", "mul.Tensor"],
            id="channels-are-composed",
        ),
    ],
)
def test_dropout_is_fused_where_torch_fuses_it(function, expected) -> None:
    assert names(captured(function, (2, 3, 4, 5))) == expected


def test_dropout_keeps_a_byte_mask() -> None:
    """cuda/Dropout.cu, `dropout_cuda<bool>`."""
    trace = captured(lambda x: F.dropout(x, 0.1).square(), (16, 8))
    assert made_bytes(trace, only(trace, "native_dropout.default")) == [128 * 2, 128]
    assert "native_dropout_backward" in names(trace, "backward")


# -- softmax and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [  # SoftMax.cpp, softmax: half_to_float for float16 only
        pytest.param(FP16, ["_softmax"], id="float16-fuses"),
        pytest.param(BF16, ["_to_copy", "_softmax"], id="bfloat16-copies"),
    ],
)
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_in_float32(function, dtype, expected) -> None:
    trace = captured(lambda x: function(x, -1, dtype=FP32), (4, 8), dtype=dtype)
    name = "_softmax" if function is F.softmax else "_log_softmax"
    assert names(trace) == [entry.replace("_softmax", name) for entry in expected]
    assert made_bytes(trace, only(trace, name + ".default")) == [4 * 8 * 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # LossNLL.cpp, cross_entropy_loss: log_softmax is given its dtype, which autocast leaves
        pytest.param({"dtype": BF16}, [("_log_softmax", [64]), ("nll_loss_forward", [2, 2])], id="bfloat16"),
        pytest.param(
            {"dtype": BF16, "autocast": BF16},
            [("_log_softmax", [64]), ("_to_copy", [128]), ("nll_loss_forward", [4, 4])],
            id="bfloat16-under-autocast",
        ),
        pytest.param(
            {"dtype": FP32, "autocast": BF16},
            [("_log_softmax", [128]), ("nll_loss_forward", [4, 4])],
            id="float32-under-autocast",
        ),
    ],
)
def test_cross_entropy(options, expected) -> None:
    trace = captured(lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device="cuda")), (4, 8), **options)
    ops = [op for op in trace.ops if op.phase.value == "forward" and not op.view and "zeros" not in op.name]
    found = [(op.name.removeprefix("aten.").removesuffix(".default"), made_bytes(trace, op)) for op in ops]
    assert found == expected


def test_a_reduced_loss_holds_the_unreduced_one() -> None:
    """BinaryOps.cpp, `mse_loss_out`."""
    trace = captured(lambda x: F.mse_loss(x, torch.zeros(4, 8, device="cuda")), (4, 8), dtype=FP32)
    assert only(trace, "mse_loss.default").workspace_bytes == 4 * 8 * 4


# -- indexing ------------------------------------------------------------------------------------------------


def embed(count: int):
    return lambda weight: F.embedding(torch.zeros(count, dtype=torch.long, device="cuda"), weight).square()


def test_few_embedded_tokens_need_no_sort() -> None:
    """cuda/Embedding.cu, `embedding_dense_backward_cuda`: up to 3072 indices."""
    assert only(captured(embed(3072), (100, 8)), "embedding_dense_backward.default").workspace_bytes == 0


def test_many_embedded_tokens_are_sorted_and_summed_in_parts() -> None:
    """cuda/EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`."""
    count, rows, width = 4000, 1000, 8
    partial = count // 10 + rows
    indices = 2 * count + count + 2 * rows + partial
    trace = captured(embed(count), (rows, width))
    expected = indices * 8 + 2 * 8 + partial * width * 4
    assert only(trace, "embedding_dense_backward.default").workspace_bytes == expected


def index_at(*shape: int, dtype=torch.long) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [  # cuda/Indexing.cu, index_put_with_sort_kernel
        pytest.param(lambda x: x[index_at(50)], (1000, 8), 50 * 8 * (4 + 2), id="four-and-cubs-two"),
        pytest.param(lambda x: x[index_at(50)], (200, 8), 50 * 8 * 4, id="eight-bits-sort-in-one-pass"),
        pytest.param(lambda x: x[:, index_at(50)], (4, 300), 50 * 8 * (4 + 2), id="second-dimension"),
        pytest.param(
            # not next to each other: brought to the front, which copies the target
            lambda x: x[index_at(50), :, index_at(50)],
            (100, 8, 10),
            100 * 8 * 10 * 4 + 50 * 8 * (4 + 2),
            id="apart",
        ),
        # 500 indices to 2 rows: 10 x 50 broadcast of two, the sum so far, a remainder and a product are less than four
        pytest.param(lambda x: x[index_at(10, 1), index_at(50)], (100, 10, 2), 500 * 8 * (4 + 2), id="broadcast"),
    ],
)
def test_the_gradient_of_indexing_sorts_linear_indices(function, shape, expected) -> None:
    trace = captured(lambda x: function(x).square(), shape, dtype=FP32)
    assert only(trace, "_index_put_impl_.default").workspace_bytes == expected


def test_indices_are_laid_out_alike() -> None:
    """TensorAdvancedIndexingUtils.h, `AdvancedIndex`: each of several with other strides; int32 ones as int64."""
    trace = captured(lambda x: x[index_at(10, 1), index_at(50)].square(), (100, 10))
    assert only(trace, "index.Tensor").workspace_bytes == 2 * 500 * 8
    trace = captured(lambda x: x[index_at(50), index_at(50)].square(), (100, 10))
    assert only(trace, "index.Tensor").workspace_bytes == 0
    trace = captured(lambda x: x[index_at(50, dtype=torch.int32)].square(), (100, 10))
    assert only(trace, "index.Tensor").workspace_bytes == 50 * 8


@pytest.mark.parametrize(
    ("function", "name"),
    [  # torch/csrc/autograd/FunctionsManual.cpp: in place, unless a dispatch mode is active
        pytest.param(lambda x, i: x[i], "_index_put_impl_", id="index"),
        pytest.param(lambda x, i: x.index_select(0, i), "index_add_", id="index-select"),
        pytest.param(lambda x, i: x.gather(0, i[:, None]), "scatter_add_", id="gather"),
        pytest.param(lambda x, i: x.topk(2)[0], "scatter_.src", id="topk"),
        pytest.param(lambda x, i: x.max(-1)[0], "scatter_.src", id="max"),
    ],
)
def test_gradients_of_selections_are_scattered_in_place(function, name) -> None:
    trace = captured(
        lambda x: function(x, torch.zeros(5, dtype=torch.long, device="cuda")).square(), (20, 8), dtype=FP32
    )
    assert name in names(trace, "backward")
    work = [op for op in trace.ops if op.phase.value == "backward" and not op.view]
    whole = [op for op in work if 20 * 8 * 4 in made_bytes(trace, op) and not op.mutates]
    assert len(whole) == 1


# -- recurrent layers ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(8, 16, num_layers=2, batch_first=True, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].sum()


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize(("layer", "kept", "cell"), [(nn.LSTM, 6, 384), (nn.GRU, 5, 0), (nn.RNN, 1, 0)])
def test_cudnn_runs_a_recurrent_layer_as_one_op(layer, kept, cell) -> None:
    """cudnn/RNN.cpp, `_cudnn_impl`; the reserve space is an estimate and the trace says so."""
    result = trace(Step(Recurrent(layer), spec((3, 5, 8)), optimizer=None), target=H100)
    op = only(result, "_cudnn_rnn.default")
    reserve = 3 * 5 * 16 * 2 * kept * 4
    weights = op.outputs[4].storage
    assert made_bytes(result, op)[:4] == [3 * 5 * 16 * 4, 2 * 3 * 16 * 4, cell, reserve]
    assert result.storages[weights].category is Category.PARAMETER
    backward = only(result, "_cudnn_rnn_backward.default")
    gradients = {result.storages[parameter.gradient].bytes for parameter in result.parameters}
    assert gradients == {sum(result.storages[parameter.storage].bytes for parameter in result.parameters)}
    assert op.flops == 2 * 15 * sum(p.shape[0] * p.shape[1] for p in result.parameters if len(p.shape) == 2)
    assert backward.flops == 2 * op.flops
    assert any("reserve" in note for note in result.notes)


# -- copies -----------------------------------------------------------------------------------------------


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("matrix", "copied"),
    [  # cuda/Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas
        pytest.param(meta(4, 8), False, id="contiguous"),
        pytest.param(meta(4, 8).t(), False, id="transposed"),
        pytest.param(meta(4, 16)[:, :8], False, id="rows-with-gaps"),
        pytest.param(meta(4, 16)[:, ::2], True, id="columns-with-gaps"),
        pytest.param(meta(1, 1).expand(4, 8), True, id="expanded"),
        pytest.param(meta(1, 4, 8).expand(3, 4, 8), False, id="expanded-batch"),
        pytest.param(meta(3, 4, 1).expand(3, 4, 8), True, id="expanded-columns"),
        pytest.param(meta(3, 4, 2, 8).transpose(1, 2)[:, 0], False, id="heads"),
    ],
)
def test_matrices_that_cublas_cannot_read_are_copied(matrix, copied) -> None:
    assert blas_copy(matrix) == (matrix.numel() * 4 if copied else 0)


def test_the_gradient_of_a_sum_is_copied_for_each_product() -> None:
    trace = captured(lambda x, w: (x @ w).sum(), (4, 8), (8, 16))
    products = [op for op in trace.ops if op.name == "aten.mm.default" and op.phase.value == "backward"]
    assert [op.workspace_bytes for op in products] == [4 * 16 * 2, 4 * 16 * 2]


def test_softmax_of_a_strided_input_copies_it() -> None:
    """cuda/SoftMax.cu, `host_softmax` and `host_softmax_backward`."""
    trace = captured(lambda x: F.softmax(x.t(), -1).sum(), (4, 8))
    assert only(trace, "_softmax.default").workspace_bytes == 4 * 8 * 2
    assert only(trace, "_softmax_backward_data.default").workspace_bytes == 4 * 8 * 2


# -- mixtures of experts -------------------------------------------------------------------------------------


def test_grouped_products_have_gradients_and_flops() -> None:
    """GroupedMMUtils.h, `create_grouped_gemm_output_tensor`; torch's own counter has no grouped product."""

    def run(x, w):
        offsets = torch.tensor([8, 16], dtype=torch.int32, device="cuda")
        return F.grouped_mm(x, w, offs=offsets).square()

    trace = captured(run, (16, 32), (2, 32, 64))
    products = [op for op in trace.ops if op.name == "aten._grouped_mm.default"]
    assert sorted(made_bytes(trace, op)[0] for op in products) == [16 * 32 * 2, 16 * 64 * 2, 2 * 32 * 64 * 2]
    assert [op.flops for op in products] == [2 * 16 * 32 * 64] * 3


@pytest.mark.parametrize(("dtype", "width"), [(BF16, 64), (FP32, 62), (BF16, 60)])
def test_grouped_products_pad_rows_to_sixteen_bytes(dtype, width) -> None:
    """GroupedMMUtils.h, `create_grouped_gemm_output_tensor`; float32 runs as one product after the other."""

    def run(x, w):
        offsets = torch.tensor([8, 16], dtype=torch.int32, device="cuda")
        return F.grouped_mm(x, w[..., :width], offs=offsets).detach() * x.sum()

    trace = captured(run, (16, 32), (2, 32, 64), dtype=dtype)
    output = only(trace, "_grouped_mm.default").outputs[0]
    assert output.shape == (16, width)
    assert output.stride == (64, 1)


def test_what_cudnn_decides_by_itself_is_in_the_notes() -> None:
    trace = captured(lambda x, w: F.conv2d(x, w).square(), (2, 3, 8, 8), (4, 3, 3, 3))
    assert any("cuDNN chooses its workspace" in note for note in trace.notes)
    assert only(trace, "convolution.default").workspace_bytes == 0


def test_transformers_experts_are_captured_as_grouped_products() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    config._experts_implementation = "grouped_mm"
    step = Step(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=BF16),
        {"input_ids": spec((2, 16), torch.long), "labels": spec((2, 16), torch.long)},
    )
    result = trace(step, target=H100)
    assert sum(op.name == "aten._grouped_mm.default" for op in result.ops) == 6
    assert "_scaled_dot_product_cudnn_attention" in names(result)


# -- optimizers ----------------------------------------------------------------------------------------------

SIZES = [16 * 8, 16, 4 * 16, 4]


def trained(optimizer, **options):
    model = nn.Sequential(nn.Linear(8, 16, device="meta"), nn.Linear(16, 4, device="meta"))
    step = Step(model, spec((2, 8)), loss=lambda output, _: output.sum(), optimizer=optimizer, **options)
    return trace(step, target=H100)


FOREACH_ADAM = ["_foreach_lerp_.Scalar", "_foreach_mul_.Scalar", "_foreach_addcmul_.Scalar", "_foreach_sqrt"]
FOREACH_ADAM += ["_foreach_div_.ScalarList", "_foreach_add_.Scalar", "_foreach_addcdiv_.ScalarList"]

OPTIMIZERS = [  # torch/optim: foreach is the default on CUDA; the lists after the ops are states a parameter
    pytest.param(torch.optim.Adam, FOREACH_ADAM, 2, False, id="adam"),
    pytest.param(torch.optim.AdamW, ["_foreach_mul_.Scalar", *FOREACH_ADAM], 2, False, id="adamw"),
    pytest.param(
        partial(torch.optim.AdamW, fused=True),
        ["_foreach_add_.Scalar", "_fused_adamw_"],
        2,
        True,
        id="adamw-fused",
    ),
    pytest.param(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        ["_foreach_mul_.Scalar", "_foreach_add_.List", "_foreach_add_.List"],
        1,
        False,
        id="sgd-momentum",
    ),
    pytest.param(partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), ["_fused_sgd_"], 1, False, id="sgd-fused"),
    pytest.param(
        torch.optim.RMSprop,
        [
            "_foreach_mul_.Scalar",
            "_foreach_addcmul_.Scalar",
            "_foreach_sqrt",
            "_foreach_add_.Scalar",
            "_foreach_addcdiv_.Scalar",
        ],
        1,
        False,
        id="rmsprop",
    ),
    pytest.param(
        torch.optim.Adagrad,
        [
            "_foreach_addcmul_.Scalar",
            "_foreach_sqrt",
            "_foreach_add_.Scalar",
            "_foreach_mul.ScalarList",
            "_foreach_addcdiv_.Scalar",
        ],
        1,
        False,
        id="adagrad",
    ),
]


@pytest.mark.parametrize(("optimizer", "expected", "states", "step_on_device"), OPTIMIZERS)
def test_optimizers_run_their_cuda_path(optimizer, expected, states, step_on_device) -> None:
    result = trained(optimizer)
    assert names(result, "optimizer") == expected
    state = sum(s.bytes for s in result.storages if s.category is Category.OPTIMIZER_STATE)
    assert state == states * sum(SIZES) * 4 + (len(SIZES) * 4 if step_on_device else 0)
    for op in result.ops:
        if op.name == "aten._foreach_sqrt.default":
            assert made_bytes(result, op) == [size * 4 for size in SIZES]


def test_capturable_adam_keeps_its_step_on_the_device() -> None:
    result = trained(partial(torch.optim.Adam, capturable=True))
    state = sum(s.bytes for s in result.storages if s.category is Category.OPTIMIZER_STATE)
    assert state == 2 * sum(SIZES) * 4 + len(SIZES) * 4
    assert "_foreach_pow.ScalarAndTensor" in names(result, "optimizer")


def test_clipping_takes_the_foreach_path() -> None:
    """torch/nn/utils/clip_grad.py; cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`: a float32 per chunk
    and tensor.
    """
    result = trained(torch.optim.AdamW, clip_grad_norm=1.0)
    assert names(result, "optimizer")[:7] == [
        "_foreach_norm.Scalar", "stack", "linalg_vector_norm", "add.Tensor", "reciprocal", "mul.Tensor",
        "clamp",
    ]  # fmt: skip
    assert names(result, "optimizer")[7] == "_foreach_mul_.Tensor"
    assert only(result, "_foreach_norm.Scalar").workspace_bytes == len(SIZES) * 4
