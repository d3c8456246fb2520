"""The grammar of `model.attention`."""

import pytest

from models.attention.stack import parse_stack


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("softmax", 1, "s"),
        ("softmax", 3, "sss"),
        ("linear/softmax", 2, "ls"),
        ("linear/softmax", 4, "lsls"),
        ("3xlinear/softmax", 4, "llls"),
        ("3xlinear/softmax", 8, "lllsllls"),
        ("linear/2xsoftmax/1xlinear", 4, "lssl"),
        (" linear / 2xsoftmax ", 3, "lss"),
        ("12xlinear", 12, "l" * 12),
    ],
)
def test_layers(text, layers, expected):
    names = {"s": "softmax", "l": "linear"}
    assert parse_stack(text, layers) == [names[letter] for letter in expected]


@pytest.mark.parametrize(
    ("text", "layers", "message"),
    [
        ("", 2, r"model\.attention '' has an empty layer"),
        ("softmax/", 2, r"'softmax/' has an empty layer"),
        ("softmax//linear", 2, r"'softmax//linear' has an empty layer"),
        ("softmax/ /linear", 3, r"has an empty layer"),
        ("0xlinear/softmax", 1, r"'0xlinear/softmax' repeats 'linear' 0 times"),
        ("softmax", 0, r"num_layers must be at least 1, got 0"),
        ("softmax/linear", 3, r"lists 2 layers, .* model\.num_layers=3"),
        ("3xlinear", 2, r"lists 3 layers, .* model\.num_layers=2"),
        ("linear/sotfmax", 2, r"in model\.attention 'linear/sotfmax': .*'sotfmax'; there are: "
                              r"softmax, .*\. Did you mean 'softmax'\?"),
        ("2x", 2, r"unknown attention mechanism '2x'"),
        ("x2linear", 2, r"unknown attention mechanism 'x2linear'"),
        ("-1xlinear", 2, r"unknown attention mechanism '-1xlinear'"),
        ("Softmax", 2, r"unknown attention mechanism 'Softmax'"),
    ],
)  # fmt: skip
def test_refused(text, layers, message):
    with pytest.raises(ValueError, match=message):
        parse_stack(text, layers)


def test_a_repeat_of_many_digits_is_refused_and_not_built():
    with pytest.raises(ValueError, match=r"99999999999999.*num_layers=2"):
        parse_stack("99999999999999xlinear", 2)
