"""The command line."""

import pytest
import torch

from nanogeex.command_line import parse
from nanogeex.config import TrainConfig, UsageError
from nanogeex.infer_config import InferConfig
from nanogeex.precision import default_precision
from shard import ShardConfig


def train(*argv):
    return parse(TrainConfig, list(argv), "")


def test_defaults_then_preset_then_flags():
    assert train().hidden_size == 128
    assert train("--preset", "125m").hidden_size == 768
    config = train("--preset", "codegeex-13b", "--hidden-size", "2560", "--tp", "8")
    assert config.hidden_size == 2560 and config.num_layers == 39
    assert config.tensor_model_parallel_size == 8
    assert config.padded_vocab_size == 52224


def test_short_forms():
    assert train("--fp16").precision == "fp16"
    assert train("--bf16").precision == "bf16"
    assert train("--precision", "fp32", "--ln-fp16", "--checkpoint-activations").ln_fp16
    assert train("--data", "a", "b").data == ["a", "b"]
    assert parse(InferConfig, ["--prompt", "a", "--prompt", "b", "c"], "").prompt == ["a", "b", "c"]


def test_recompute():
    assert train("--checkpoint-activations").recompute == "full"
    assert train("--recompute", "selective").recompute == "selective"
    assert train("--preset", "codegeex-13b").recompute == "full"


def test_schedule_defaults():
    assert train("--train-iters", "20").lr_decay_iters == 20
    assert train("--train-iters", "10", "--lr-decay-iters", "200").lr_warmup_iters == 10
    assert train("--lr-warmup-iters", "0").lr_warmup_iters == 0
    assert train("--train-iters", "0").lr_decay_iters == 1


def test_default_precision(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_precision(train(), cpu) == "fp32"
    assert default_precision(train("--preset", "125m"), cpu) == "bf16"
    assert default_precision(train("--preset", "codegeex-13b"), cuda) == "fp16"
    assert default_precision(train(), cuda) == "bf16"


@pytest.mark.parametrize("argv, says", [
    ("--hiden-size 3", "--hiden-size: no such flag or argument; did you mean --hidden-size"),
    ("stray", "stray: no such flag"),
    ("--lr", "--lr: expected one argument"),
    ("--lr fast", "--lr: invalid float value: 'fast'"),
    ("--lr -1", "--lr -1.0: must be above 0"),
    ("--lr nan", "--lr nan: not a finite number"),
    ("--lr inf", "--lr inf: not a finite number"),
    ("--seq-length 0", "--seq-length 0: must be 1 or more"),
    ("--global-batch-size 0", "--global-batch-size 0: must be 1 or more"),
    ("--micro-batch-size -4", "--micro-batch-size -4: must be 1 or more"),
    ("--adam-beta2 1", "--adam-beta2 1.0: must be 0.999999 or less"),
    ("--weight-decay inf", "--weight-decay inf: not a finite number"),
    ("--preset huge", "--preset huge: unknown; choose one of tiny, 125m, codegeex-13b"),
    ("--precision fp8", "--precision fp8: unknown; choose one of fp32, bf16, fp16"),
    ("--debug-inf 3", "--debug-inf 3: not STEP:RANK"),
    ("--recompute some", "--recompute some: unknown; choose one of none, selective, full"),
    ("--hidden-dropout 1", "--hidden-dropout 1.0: must be 0.99 or less"),
    ("--grad-reduce-dtype fp64", "--grad-reduce-dtype fp64: unknown; choose one of fp32, bf16"),
    ("--min-loss-scale 1e6", "--min-loss-scale 1000000.0: above --initial-loss-scale 4096.0"),
    ("--min-lr 1", "--min-lr 1.0: above --lr"),
    ("--tp 3", "--tensor-model-parallel-size 3: does not divide --num-attention-heads 8; "
     "choose one of 1, 2, 4, 8"),
    ("--tp 8 --seq-length 100", "does not divide --seq-length 100; choose one of 1, 2, 4"),
    ("--tp 8 --make-vocab-size-divisible-by 1 --vocab-size 4100",
     "does not divide the padded vocabulary 4100"),
    ("--hidden-size 100", "--hidden-size 100: not a multiple of --num-attention-heads 8")])
def test_mistakes_are_one_line_with_field_value_and_remedy(argv, says):
    with pytest.raises(UsageError) as mistake:
        train(*argv.split())
    assert says in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("argv, says", [
    ("--language Pyhton", "--language Pyhton: unknown; choose one of Assembly, C, C#, C++"),
    ("--language C --translate-to Jav", "--translate-to Jav: unknown; choose one of"),
    ("--translate-to java", "--translate-to Java: from which language? give --language, too"),
    ("--language c --prompt-ids 5", "--language C: --prompt-ids are taken as they are"),
    ("--stop=", "--stop: empty")])
def test_mistakes_of_infer(argv, says):
    with pytest.raises(UsageError) as mistake:
        parse(InferConfig, argv.split(), "")
    assert says in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("config", [TrainConfig, InferConfig, ShardConfig])
def test_help_lists_every_flag_with_its_default(config, capsys):
    with pytest.raises(SystemExit) as leave:
        parse(config, ["--help"], "words")
    assert leave.value.code == 0
    text = capsys.readouterr().out
    flags = {entry.split()[0].strip(","): entry for entry in text.split("\n  --")[1:]}
    for name, field in config.__dataclass_fields__.items():
        if "positional" not in field.metadata:
            assert "default:" in flags[name.replace("_", "-")].replace("\n", " "), name
