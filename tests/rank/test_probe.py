"""The probe: a model whose tokens depend on where in the batch they stand is refused at boot, whatever its family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemon.rank.convert import quiet_transformers
from daemon.rank.errors import UnsupportedModel
from daemon.rank.model import GenericModel
from tests.rank.models import COMMON, tiny_model


def llama4(directory: Path, tuning: bool) -> Path:
    """A tiny Llama 4 that attends in full, with layers without rope whose queries `tuning` scales by positions."""
    quiet_transformers()
    import transformers

    shape = COMMON | {"num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    kinds = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1]}
    scales = {"floor_scale": 4, "attn_scale": 3.0, "attn_temperature_tuning": tuning, "initializer_range": 0.2}
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(
        transformers.Llama4TextConfig(**(shape | kinds | scales))
    ).save_pretrained(directory)
    return directory


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    """It scales queries by the place in the batch; without that it is taken."""
    with pytest.raises(UnsupportedModel, match=r"llama4_text: .* depends on where in the batch it stands"):
        GenericModel(llama4(tmp_path / "tuned", tuning=True), torch.float32, torch.device("cpu"))
    assert len(GenericModel(llama4(tmp_path / "plain", tuning=False), torch.float32, torch.device("cpu")).layers) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_mixes_neighbours_is_refused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed-forward part that also sees the token before, as token shift does."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    directory, honest = tiny_model(tmp_path, "llama"), LlamaMLP.forward
    GenericModel(directory, dtype, torch.device("cpu"))

    def shifted(module: LlamaMLP, x: Tensor) -> Tensor:
        return honest(module, x + 0.5 * x.roll(1, dims=1))

    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    with pytest.raises(UnsupportedModel, match=r"llama: .* depends on where in the batch it stands"):
        GenericModel(directory, dtype, torch.device("cpu"))
