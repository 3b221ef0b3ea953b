"""A native model at once is the same model module by module, bit for bit."""

import copy

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from kernels.native.library import operators
from kimi_mini import KimiForCausalLM, preset
from kimi_mini.layers.mlp import MLP
from kimi_mini.layers.parameters import Linear
from tests.kimi_mini.golden_cases import (
    FOLDER,
    NAMES,
    Sequence,
    golden_model,
    poisoned_state,
    run_step,
)
from tests.kimi_mini.workbench.work import bytecodes

pytestmark = pytest.mark.needs_native


class Calls:
    """Counts what a backend does at once; declines everything if told to."""

    def __init__(self, net, declines=False):
        self.made, self.declines = 0, declines
        self.net, self.backend = net, net.dispatcher.backend

    def __call__(self, *args):
        logits = None if self.declines else self.backend.functions.decoder(*args)
        self.made += logits is not None
        return logits

    def __enter__(self):
        functions = self.backend.functions._replace(decoder=self)
        self.net.dispatcher.backend = self.backend._replace(functions=functions)
        return self

    def __exit__(self, *_):
        self.net.dispatcher.backend = self.backend


def nano(**changes):
    return KimiForCausalLM.from_config(preset("nano"), seed=5, backend="native", **changes)


def life(net):
    """Prompts in pieces, a mixed step, decode of several rows: every result of five steps, and all
    that is left behind."""
    state = poisoned_state(net, slots=3, pages=60, page=4)
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(1)) + 1
    first, second = (Sequence(net, state, 3 - r, pages[30 * r :][:30]) for r in range(2))
    tokens = torch.randint(3, 259, (90,), generator=torch.Generator().manual_seed(2))
    out = [
        run_step([(first, tokens[:21]), (second, tokens[21:24])]),
        run_step([(second, tokens[24:40])]),
        run_step([(first, tokens[40:41]), (second, tokens[41:48])]),
        run_step([(second, tokens[48:49]), (first, tokens[49:50])]),
        run_step([(first, tokens[50:51])]),
    ]
    return [*out, *state]


def same(a, b):
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_modules(name, dtype):
    net = golden_model(name, dtype, "native")
    with Calls(net) as at_once:
        one = life(net)
    with Calls(net, declines=True) as by_modules:
        other = life(net)
    assert (at_once.made, by_modules.made) == (5, 0)
    assert same(one, other)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "watched",
    [
        lambda net: net.model,
        lambda net: net.lm_head,
        lambda net: net.model.layers[1],
        lambda net: net.model.layers[3].self_attn,
        lambda net: net.model.layers[2].block_sparse_moe,
        lambda net: net.model.layers[2].mlp_res,
    ],
)
def test_a_model_that_is_watched_calls_its_modules(watched, held):
    net, seen = nano(), []
    if held:
        net.hold_weights()
    module = watched(net)
    with Calls(net) as calls:
        handle = module.register_forward_pre_hook(lambda *_: seen.append(1))
        life(net)
        assert calls.made == 0 and len(seen) == 5
        handle.remove()
        life(net)
    assert calls.made == 5


class Twice(MLP):
    def forward(self, *args):
        return 2 * super().forward(*args)


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return 2 * self.inner(*args)


@pytest.mark.parametrize("put", ["class", "wrapper"])
def test_a_module_of_another_kind_is_called(put):
    net, plain = nano(), nano()
    mlp = net.model.layers[0].mlp
    if put == "class":
        mlp.__class__ = Twice
    else:
        net.model.layers[0].mlp = Wrapped(mlp)
    with Calls(net) as calls:
        different = life(net)
    assert calls.made == 0 and not same(different, life(plain))


def test_a_hook_on_all_modules_sees_them():
    net, seen = nano(), []
    net.hold_weights()
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        life(net)
    finally:
        handle.remove()
    assert seen.count(type(net.model.layers[0])) == 5 * len(net.model.layers)


def test_one_layer_in_another_dtype_is_called_or_refused_with_the_state_as_it_was():
    net = nano()
    net.model.layers[3].bfloat16()
    with Calls(net) as calls:
        life(net)
    assert calls.made == 0, "its modules can"
    held = nano()
    held.hold_weights()
    held.model.layers[3].bfloat16()
    state = poisoned_state(held, slots=1, pages=9, page=4)
    with pytest.raises(ValueError, match="of weights must be Float"):
        Sequence(held, state, 1, torch.arange(1, 10)).run(torch.tensor([3, 4]))
    assert all(part.isnan().all() for part in state)


def test_weights_that_are_loaded_in_others_places_are_seen():
    net, other = nano(), KimiForCausalLM.from_config(preset("nano"), seed=6, backend="native")
    net.hold_weights()
    net.load_state_dict(other.state_dict(), assign=True)
    assert same(life(net), life(other))


def test_weights_that_change_in_place_are_seen_and_others_until_they_are_held():
    net = nano()
    before = life(net)
    projection = net.model.layers[0].self_attn.o_proj
    other = Linear(projection.weight.shape[1], projection.weight.shape[0], torch.float32)
    with torch.no_grad():
        other.weight.copy_(projection.weight).mul_(2)
    net.model.layers[0].self_attn.o_proj = other
    after = life(net)
    assert not same(before, after)

    net.hold_weights()
    assert same(life(net), after)
    net.model.layers[0].self_attn.o_proj = projection
    assert same(life(net), after), "held"
    net.hold_weights()
    assert same(life(net), before)
    with torch.no_grad():
        projection.weight.mul_(2)
    assert same(life(net), after), "in place"


def test_a_copy_of_a_model_that_holds_its_weights_has_its_own():
    net = nano()
    net.hold_weights()
    before = life(net)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert not life(twin)[0].any()
    assert same(life(net), before)


def test_a_step_takes_as_much_python_whatever_the_number_of_layers():
    """Of a model that holds its weights."""

    def work(folder):
        net = KimiForCausalLM.from_pretrained(folder, backend="native")
        net.hold_weights()
        state = poisoned_state(net, slots=1, pages=9, page=4)
        row = Sequence(net, state, 1, torch.arange(1, 10))
        row.run(torch.tensor([3, 4, 5]))
        row.run(torch.tensor([6]))
        return len(net.model.layers), bytecodes(lambda: row.run(torch.tensor([7])))

    (few, less), (many, more) = sorted(work(FOLDER / name) for name in NAMES[:2])
    deep = KimiForCausalLM.from_config(preset("deep"), backend="native")
    assert len(deep.model.layers) > many >= few
    assert less == more


@pytest.fixture
def call(monkeypatch):
    """The arguments, by name, of the operator's call that a step of two tokens makes."""
    seen, native = [], operators().decoder

    class Recording:
        def decoder(self, *args):
            seen.append(args)
            return native(*args)

    monkeypatch.setattr("kernels.native.layers.operators", Recording)
    net = nano()
    Sequence(net, poisoned_state(net, slots=1, pages=9, page=4), 1, torch.arange(1, 10)).run(
        torch.tensor([3, 4])
    )
    names = [argument.name for argument in native.default._schema.arguments]
    return dict(zip(names, *seen, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"weights": c["weights"][:-1]}, "weights must have"),
        (lambda c: {"weights": [*c["weights"], None]}, "weights must have"),
        (lambda c: {"weights": [*c["weights"][:3], None, *c["weights"][4:]]}, "entry 3 of weights"),
        (lambda c: {k: [] for k in ("opens_block", "is_kda", "is_moe")}, "at least one layer"),
        (lambda c: {"is_kda": c["is_kda"][:-1]}, "equally many layers"),
        (lambda c: {"recurrent": c["recurrent"][1:]}, "recurrent and conv must be of 3 layers"),
        (lambda c: {"conv": c["conv"][1:]}, "recurrent and conv must be of 3 layers"),
        (lambda c: {"latent": c["latent"][0]}, "latent must be of 2 layers"),
        (lambda c: {"out_rows": c["out_rows"] + 10**6}, "out_rows must lie in"),
        (lambda c: {"out_rows": c["out_rows"][:0]}, "out_rows must be"),
        (lambda c: {"ids": c["ids"] + 10**6}, "index"),
        (lambda c: {"wanted": torch.tensor([2])}, "wanted must lie in"),
        (lambda c: {"slots": c["slots"] + 5}, "names slot"),
        (lambda c: {"spans": c["spans"] + 5}, "spans must be"),
        (lambda c: {"pages": c["pages"] + 50}, "names page"),
        (lambda c: {"latent": c["latent"][..., :-1]}, "latent must have rows"),
        (lambda c: {"recurrent": c["recurrent"].mT.contiguous().mT}, "contiguous inside"),
        (lambda c: {"recurrent": c["recurrent"].double()}, "recurrent must be Float"),
        (lambda c: {n: c[n].bfloat16() for n in ("conv", "latent")}, "conv must be Float"),
        (lambda c: {"latent": c["latent"].bfloat16()}, "latent must be Float"),
        (lambda c: {"latent": c["latent"][:, :, :0]}, "with rows in a page"),
        (lambda c: {"kda_heads": c["kda_heads"] + 1}, "recurrent must be of"),
    ],
)
def test_what_does_not_fit_is_refused(call, change, message):
    pools = [call[name] for name in ("recurrent", "conv", "latent")]
    before = [pool.clone() for pool in pools]
    with pytest.raises((ValueError, IndexError), match=message):
        operators().decoder(**(call | change(call)))
    assert same(pools, before)


def test_a_flag_is_any_number_but_zero(call):
    flags = ("opens_block", "is_kda", "is_moe")
    twice = {name: [2 * flag for flag in call[name]] for name in flags}
    pools = {name: call[name].clone() for name in ("recurrent", "conv", "latent")}
    assert torch.equal(operators().decoder(**(call | pools | twice)), operators().decoder(**call))
    assert same(pools.values(), [call[name] for name in pools])


def test_it_has_a_fake(call):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = operators().decoder(**call)
    assert fake.shape == operators().decoder(**call).shape


def test_latent_rows_in_another_dtype_than_their_pool_are_not_written():
    """float32 weights of the norm of a bf16 model make rows that are twice as wide in memory."""
    net = nano(dtype="bfloat16")
    net.hold_weights()
    layer = next(x for x in net.model.layers if hasattr(x.self_attn, "kv_a_layernorm"))
    layer.self_attn.kv_a_layernorm.float()
    state = poisoned_state(net, slots=1, pages=9, page=4)
    with pytest.raises(ValueError, match="latent rows must be BFloat16"):
        Sequence(net, state, 1, torch.arange(1, 10)).run(torch.tensor([3, 4]))
    assert state.latent.isnan().all()
