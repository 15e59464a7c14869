"""README's Python runs as it stands, given the names that it leaves to the reader."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers as hf

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_trains_under_its_budget_and_the_engine_holds_the_cast_weights():
    config = hf.LlamaConfig(
        vocab_size=31, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}

    def logits_of(model, batch):
        return model(batch).logits[:, :-1].flatten(0, 1)

    def loss_of(model, batch):
        return F.cross_entropy(logits_of(model, batch), batch[:, 1:].flatten())

    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    names = {"model": model, "loss_of": loss_of, "logits_of": logits_of}
    names["batches"] = [torch.randint(31, (4, 9)) for _ in range(3)]
    exec(code, names)
    assert names["opt"].t == 3
    report = names["report"]
    assert report.skipped is None
    assert report.kl_budget == 1e-3
    assert 0 < report.kl_predicted <= 1e-3 * (1 + 1e-6)
    for path, served in names["served"].items():
        weight = model.get_submodule(path).weight
        assert not torch.equal(weight, start[f"{path}.weight"])
        assert torch.equal(served, weight.bfloat16())
