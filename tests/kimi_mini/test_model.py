"""The model as a whole: one implementation for training, prefill and decode."""

import dataclasses
import itertools

import pytest
import torch

from kimi_mini import ForwardBatch, KimiForCausalLM, ModelState, preset
from kimi_mini.weights.inventory import parameter_count
from kimi_mini.weights.names import parameter_specs
from kimi_mini.workbench.cases import relative_error as relative
from kimi_mini.workbench.cases import root_mean_square_error
from kimi_mini.workbench.expert_choices import ExpertChoices
from tests.kimi_mini.golden_cases import Sequence, poisoned_state, run_step

# decision 9: whole model, float32, expert choices of the first run replayed
FLOAT32 = 5e-5
FLOAT64 = 1e-10
BOTH = pytest.mark.parametrize("backend", ["torch", "native"])


def model(name="nano", dtype=torch.float64, seed=3, **kernels):
    return KimiForCausalLM.from_config(preset(name), seed=seed, dtype=dtype, **kernels)


def ids(n, seed=0, vocab=320):
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed))


# --- shape of the thing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nano", "mini", "deep"])
def test_the_parameters_are_exactly_those_of_the_name_mapping(name):
    with torch.device("meta"):
        net = KimiForCausalLM(preset(name))
    specs = parameter_specs(preset(name))
    assert {n: tuple(p.shape) for n, p in net.named_parameters()} == {
        n: tuple(s.shape) for n, s in specs.items()
    }


def test_the_bench_preset_has_its_published_size():
    assert parameter_count(preset("bench")) == 43_700_080


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match="2,779,484,478,208 parameters would take 11,118 GB"):
        KimiForCausalLM(preset("k3"))


def test_an_unfilled_model_is_all_nan():
    net = KimiForCausalLM(preset("nano"))
    assert all(p.isnan().all() for p in net.parameters())


# --- stateless, differentiable --------------------------------------------------------------------


@BOTH
def test_gradients_through_the_chunk_form_are_those_of_the_reference_recurrence(backend):
    """Where gradients are asked for, the native backend has torch's functions."""
    inputs = ids(2 * 21).view(2, 21)

    def gradients(backend):
        net = model(backend=backend)
        net(inputs).log_softmax(-1)[:, :-1].gather(-1, inputs[:, 1:, None]).mean().backward()
        return {n: p.grad for n, p in net.named_parameters()}

    fast, slow = gradients(backend), gradients("reference")
    without = [n for n, g in slow.items() if g is None]
    # read by nothing: with an empty bank the first mixture is its only source; biases only select
    assert all("layers.0.self_attention_res" in n or "correction_bias" in n for n in without)
    for name, gradient in slow.items():
        if gradient is not None:
            assert (fast[name] - gradient).abs().max() < 1e-12, name


def test_gradients_agree_with_finite_differences():
    net = model()
    inputs = ids(19)[None]

    def loss():
        return net(inputs).log_softmax(-1)[0, :-1].gather(-1, inputs[0, 1:, None]).mean()

    loss().backward()
    for name in ("0.self_attn.A_log", "1.self_attn.conv_weight", "2.self_attn.in_proj.weight",
                 "3.self_attn.kv_b_proj.weight", "3.mlp_res.proj"):  # fmt: skip
        parameter = net.get_parameter(f"model.layers.{name}")
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter.add_(1e-6 * direction)
            up = loss()
            parameter.sub_(2e-6 * direction)
            down = loss()
            parameter.add_(1e-6 * direction)
        slope = (up - down) / 2e-6
        assert abs(slope - (parameter.grad * direction).sum()) < 1e-7 * max(1, abs(slope)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_optimiser_step_lowers_a_loss(dtype):
    net = model(dtype=dtype)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs = ids(2 * 16).view(2, 16)

    def loss():
        logits = net(inputs)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, inputs[:, 1:].flatten())

    before = loss()
    before.backward()
    optimiser.step()
    assert loss() < before - 0.01


@BOTH
@torch.no_grad()
def test_rows_of_a_batch_are_sequences_of_their_own(backend):
    net = model(backend=backend)
    inputs = ids(3 * 40).view(3, 40)
    together = net(inputs)
    assert together.shape == (3, 40, 320)
    for r in range(3):
        assert relative(together[r : r + 1], net(inputs[r : r + 1])) < FLOAT64


@BOTH
@torch.no_grad()
def test_later_tokens_change_no_bit_of_earlier_logits(backend):
    """With the same expert choices: how many tokens share an expert's product may show in the last
    bits of each of them (decision 9)."""
    net = model(dtype=torch.float32, backend=backend)
    first = ids(70)
    second = first.clone()
    second[41:] = ids(29, seed=9)
    choices = ExpertChoices(net)
    with choices.recorded(net):
        net(first[None])
    choices.tokens = torch.arange(70)
    with choices.forced(net):
        one, other = (net(text[None])[0] for text in (first, second))
    assert torch.equal(one[:41], other[:41])
    assert not torch.equal(one[41:], other[41:])


def test_a_call_leaves_nothing_behind():
    """BR-78: A, B, an error, A."""
    net = model(dtype=torch.float32)
    a, b = ids(33)[None], ids(20, seed=5)[None]
    before = net(a)
    net(b)
    with pytest.raises(ValueError, match="0..319"):
        net(torch.tensor([[1, 320]]))
    assert torch.equal(net(a), before)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1)])
def test_empty_and_tiny_batches_have_the_right_shape(shape):
    assert model()(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 320)


# --- over slots and pages -------------------------------------------------------------------------


CUTS = [(1,), (3,), (40,), (16, 17, 1), (100,)]
IN_PIECES = [
    *itertools.product(["nano"], [3], ["torch", "native"], CUTS),
    *(
        pytest.param("mini", 1, *case, marks=() if case[1] == (16, 17, 1) else pytest.mark.slow)
        for case in itertools.product(["torch", "native"], CUTS)
    ),
]


@pytest.mark.parametrize("name, seed, backend, lengths", IN_PIECES)
def test_float32_pieces_equal_one_pass_with_the_same_experts(name, seed, backend, lengths):
    """Random splits, decode among them; decision 9."""
    net = model(name, torch.float32, seed, backend=backend)
    vocab = net.config.vocab_size
    total = ids(120, seed=len(lengths), vocab=vocab)
    choices = ExpertChoices(net)
    with torch.inference_mode(), choices.recorded(net):
        whole = net(total[None])[0]
    sequence = Sequence(net, poisoned_state(net, slots=2, pages=30, page=5), 2, torch.arange(1, 31))
    turns = itertools.cycle(lengths)
    with choices.forced(net):
        while sequence.length < len(total):
            choices.tokens = torch.arange(len(total))[sequence.length :][: next(turns)]
            last = sequence.run(total[choices.tokens])
    assert relative(last, whole[-1]) < FLOAT32


@pytest.mark.parametrize("backend", ["torch", "reference", "native"])
def test_a_mixed_batch_is_its_rows_run_alone(backend):
    """Decode rows, a piece with history, a fresh row, an empty row; A-B-A over the same slots."""
    net = model(backend=backend)
    state = poisoned_state(net, slots=5, pages=40, page=4)
    alone = poisoned_state(net, slots=5, pages=40, page=4)
    pages = (torch.randperm(40, generator=torch.Generator().manual_seed(0)) + 1).split(8)

    def start(memory):
        return [Sequence(net, memory, slot, pages[slot - 1]) for slot in (4, 1, 3, 2)]

    texts = [ids(31, seed) for seed in range(4)]
    plan = [(9, 20, 0, 0), (1, 3, 7, 0), (1, 1, 1, 5), (4, 1, 0, 1), (1, 6, 17, 1)]
    batched, single = start(state), start(alone)
    for lengths in plan:
        work = [
            (s, text[s.length : s.length + n])
            for s, text, n in zip(batched, texts, lengths, strict=True)
        ]
        logits = run_step(work)
        for row, (s, text, n) in enumerate(zip(single, texts, lengths, strict=True)):
            if n:
                expected = s.run(text[s.length : s.length + n])
                assert relative(logits[row], expected) < FLOAT64
            else:
                assert (logits[row] == 0).all()
    for kind in ("recurrent", "conv"):
        got, expected = getattr(state, kind)[:, 1:5], getattr(alone, kind)[:, 1:5]
        assert relative(got, expected) < FLOAT64
    for s in single:
        rows = s.rows(s.length)
        for layer in range(2):
            got = state.latent[layer].flatten(0, 1)[rows]
            assert relative(got, alone.latent[layer].flatten(0, 1)[rows]) < FLOAT64


@BOTH
def test_rows_of_uneven_prompts_join_and_leave_without_moving_others(backend):
    """BR-07, BR-63: lengths 3, 40, 100 in pieces of 32; then a fresh row joins and one leaves."""
    net = model(backend=backend)
    state = poisoned_state(net, slots=4, pages=60, page=8)
    texts = [ids(n, seed=n) for n in (3, 40, 100, 21)]
    rows = [Sequence(net, state, i + 1, torch.arange(15) + 1 + 15 * i) for i in range(4)]
    with torch.inference_mode():
        alone = [net(text[None])[0] for text in texts]
    active = [0, 1, 2]
    joined = False
    while active:
        work = [(rows[i], texts[i][rows[i].length : rows[i].length + 32]) for i in active]
        logits = run_step(work)
        for row, i in enumerate(active):
            assert relative(logits[row], alone[i][rows[i].length - 1]) < FLOAT64
        active = [i for i in active if rows[i].length < len(texts[i])]
        if not joined:
            active, joined = [*active, 3], True


def batch_of(sequence, tokens, **changes):
    page = sequence.state.latent.shape[2]
    used = sequence.length + len(tokens)
    fields = dict(
        token_ids=tokens,
        query_start=torch.tensor([0, len(tokens)]),
        context_len=torch.tensor([sequence.length]),
        slots=torch.tensor([sequence.slot]),
        page_table=sequence.pages[None, : -(-used // page)],
        out_rows=sequence.rows(used)[sequence.length :],
    )
    return ForwardBatch(**{**fields, **changes})


@pytest.mark.parametrize(
    "backend, offsets",
    [("torch", (16, 48, 61)), ("reference", (1, 2, 37)), ("native", (1, 2, 37))],
)
def test_an_export_is_the_state_after_exactly_that_many_tokens(backend, offsets):
    net = model(backend=backend)
    state = poisoned_state(net, slots=9, pages=9, page=8)
    sequence = Sequence(net, state, 2, torch.arange(1, 10))
    sequence.run(ids(5))
    tail = ids(61, seed=1)
    exports = torch.tensor([[0, offset, 5 + i] for i, offset in enumerate(offsets)])
    net.forward_batch(batch_of(sequence, tail, exports=exports), state)
    for i, offset in enumerate(offsets):
        fresh = poisoned_state(net, slots=1, pages=9, page=8)
        other = Sequence(net, fresh, 1, torch.arange(1, 10))
        other.run(ids(5))
        other.run(tail[:offset])
        assert relative(state.recurrent[:, 5 + i], fresh.recurrent[:, 1]) < FLOAT64
        assert relative(state.conv[:, 5 + i], fresh.conv[:, 1]) < FLOAT64
    untouched = [1, 3, 4, 8, 9]
    assert state.recurrent[:, untouched].isnan().all() and state.conv[:, untouched].isnan().all()


def test_only_the_wanted_tokens_reach_the_head():
    """BR-31: one row per sequence by default; none for a piece whose logits nobody wants."""
    net = model(dtype=torch.float32)
    seen = []
    net.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    state = poisoned_state(net, slots=1, pages=9, page=8)
    sequence = Sequence(net, state, 1, torch.arange(1, 10))
    text = ids(30)
    net.forward_batch(batch_of(sequence, text, logits_at=torch.tensor([], dtype=torch.long)), state)
    net.forward_batch(batch_of(sequence, text), state)
    picked = net.forward_batch(batch_of(sequence, text, logits_at=torch.tensor([29, 4])), state)
    assert seen == [0, 1, 2]
    with torch.inference_mode():
        assert relative(picked, net(text[None])[0, [29, 4]]) < FLOAT32


def test_padding_rows_and_padding_tokens_touch_no_real_memory():
    """BR-62, D08: slots [2, -1, -1], 2 physical tokens beyond the last row."""
    net = model()
    state = poisoned_state(net, slots=3, pages=6, page=4)
    sequence = Sequence(net, state, 2, torch.tensor([5, 2]))
    text = ids(5)
    expected = Sequence(
        net, poisoned_state(net, slots=3, pages=6, page=4), 2, torch.tensor([5, 2])
    ).run(text)
    padded = ForwardBatch(
        token_ids=torch.cat([text, torch.zeros(4, dtype=torch.long)]),
        query_start=torch.tensor([0, 5, 6, 7]),
        context_len=torch.tensor([0, 0, 0]),
        slots=torch.tensor([2, -1, -1]),
        page_table=torch.tensor([[5, 2], [-1, -1], [3, -1]]),
        out_rows=torch.cat([sequence.rows(5), torch.tensor([0, -1, -1, 3])]),
    )
    logits = net.forward_batch(padded, state)
    assert relative(logits[0], expected) < FLOAT64
    assert (logits[1:] == 0).all()
    assert state.recurrent[:, [1, 3]].isnan().all() and state.conv[:, [1, 3]].isnan().all()
    assert state.latent[:, [1, 3, 4, 6]].isnan().all()


@pytest.mark.parametrize("rows", [0, 2])
def test_a_step_without_tokens_changes_nothing(rows):
    """BR-33, D07: no rows at all, or only empty ones."""
    net = model()
    state = poisoned_state(net, slots=3, pages=2, page=4)
    nothing = torch.zeros(0, dtype=torch.long)
    idle = ForwardBatch(
        token_ids=nothing,
        query_start=torch.zeros(rows + 1, dtype=torch.long),
        context_len=torch.tensor([0, 5])[:rows],
        slots=torch.tensor([3, 1])[:rows],
        page_table=torch.full((rows, 2), -1),
        out_rows=nothing,
    )
    logits = net.forward_batch(idle, state)
    assert logits.shape == (rows, 320) and (logits == 0).all()
    assert all(part.isnan().all() for part in state)


def test_state_carries_no_graph_and_may_be_written_in_any_mode():
    """BR-32."""
    net = model(dtype=torch.float32)
    assert all(p.requires_grad for p in net.parameters())
    with torch.inference_mode():
        state = poisoned_state(net, slots=1, pages=30, page=8)
    sequence = Sequence(net, state, 1, torch.arange(1, 31))
    sequence.run(ids(20))
    with torch.inference_mode():
        sequence.run(ids(20))
    state.recurrent[:, 1] *= 1.0
    for _ in range(20):
        sequence.run(ids(1))
    assert all(not part.requires_grad and part.grad_fn is None for part in state)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(token_ids=torch.tensor([5, 320])), "token_ids must lie in 0..319"),
        (dict(token_ids=torch.tensor([5, -1])), "token_ids must lie in 0..319"),
        (dict(slots=torch.tensor([4])), "slot 4; slots are 1..3"),
        (dict(context_len=torch.tensor([-1])), "context_len must not be negative"),
        (dict(page_table=torch.tensor([[7]])), "names \\[7\\], allowed: 1..6"),
        (dict(page_table=torch.tensor([[-1]])), "names \\[-1\\]"),
        (dict(context_len=torch.tensor([7])), "needs 3 pages of 4"),
        (dict(out_rows=torch.tensor([4, 28])), "out_rows must lie in -1..27"),
        (dict(out_rows=torch.tensor([4])), "out_rows must be \\[2\\]"),
        (dict(out_rows=torch.tensor([12, 14])), "token 1 to latent row 14; .* gives it row 13"),
        (dict(out_rows=torch.tensor([16, 17])), "token 0 to latent row 16; .* gives it row 12"),
        (dict(slots=torch.tensor([-1])), "token 0 to latent row 12; it belongs to no running row"),
        (dict(token_ids=torch.tensor([5.0, 6.0])), "token_ids must be integers"),
        (dict(token_ids=torch.tensor([True, True])), "token_ids must be integers"),
        (dict(token_ids=torch.tensor(5)), "token_ids must be integers along 1 axis"),
        (dict(slots=[1]), "slots must be a tensor, got list"),
        (dict(exports=torch.tensor(3)), "exports must be integers along 2 axes"),
        (dict(page_table=torch.tensor([[0]]), out_rows=torch.tensor([0, 1])), "allowed: 1..6"),
        (dict(slots=torch.tensor([1.0])), "slots must be integers"),
        (dict(page_table=torch.tensor([[3.0]])), "page_table must be integers along 2 axes"),
        (dict(exports=torch.tensor([0, 2, 3])), "exports must be integers along 2 axes"),
        (
            dict(exports=torch.tensor([[0, 2, 3]]), slots=torch.tensor([0])),
            "row 0, which is padding",
        ),
        (dict(query_start=torch.tensor([0, 3])), "beyond the 2 tokens"),
        (dict(query_start=torch.tensor([0, 2, 2])), "2 rows, but there are 1 slots"),
        (dict(exports=torch.tensor([[0, 3, 3]])), "after 3 tokens"),
        (dict(exports=torch.tensor([[0, 2, 1]])), "slot 1, which this batch uses already"),
        (dict(logits_at=torch.tensor([2])), "logits_at must lie in 0..1"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_state_untouched(changes, message):
    net = model(dtype=torch.float32)
    state = poisoned_state(net, slots=3, pages=6, page=4)
    sequence = Sequence(net, state, 1, torch.tensor([3]))
    with pytest.raises(ValueError, match=message):
        net.forward_batch(batch_of(sequence, ids(2), **changes), state)
    assert all(part.isnan().all() for part in state)


def test_an_export_off_the_grid_of_its_backend_is_refused():
    net = model(dtype=torch.float32, backend="torch")
    state = poisoned_state(net, slots=3, pages=6, page=4)
    sequence = Sequence(net, state, 1, torch.tensor([3]))
    with pytest.raises(ValueError, match="multiple of 16"):
        net.forward_batch(batch_of(sequence, ids(2), exports=torch.tensor([[0, 1, 3]])), state)
    assert all(part.isnan().all() for part in state)


@pytest.mark.parametrize("table, message", [([[3], [3]], "latent row 12"), ([[0], [0]], "1..6")])
def test_two_tokens_never_go_to_the_same_latent_row(table, message):
    """Sharing pages for reading is legal, writing to one place twice is not."""
    net = model(dtype=torch.float32)
    state = poisoned_state(net, slots=3, pages=6, page=4)
    page = table[0][0]
    batch = ForwardBatch(
        token_ids=ids(4),
        query_start=torch.tensor([0, 2, 4]),
        context_len=torch.tensor([0, 0]),
        slots=torch.tensor([1, 2]),
        page_table=torch.tensor(table),
        out_rows=torch.tensor([0, 1, 0, 1]) + 4 * page,
    )
    with pytest.raises(ValueError, match=message):
        net.forward_batch(batch, state)
    assert all(part.isnan().all() for part in state)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_any_integer_type_will_do(dtype):
    net = model()
    text = ids(20, vocab=250)
    state = poisoned_state(net, slots=2, pages=6, page=4)
    sequence = Sequence(net, state, 2, torch.tensor([5, 2, 1, 3, 6]))
    fields = vars(batch_of(sequence, text))
    batch = ForwardBatch(**{k: v if v is None else v.to(dtype) for k, v in fields.items()})
    got = net.forward_batch(batch, state)[0]
    assert relative(got, net(text[None].to(dtype))[0, -1]) < FLOAT64


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s._replace(latent=s.latent[:, :, :0]), "state.latent must be"),
        (lambda s: s._replace(recurrent=s.recurrent[:, :0]), "state.recurrent must be"),
        (lambda s: s._replace(recurrent=s.recurrent[0, 0, 0, 0]), "state.recurrent must be"),
        (lambda s: s._replace(recurrent=s.recurrent[:, :1].expand(-1, 4, -1, -1, -1)), "own"),
        (lambda s: s._replace(latent=s.latent[..., :30]), "state.latent must be"),
        (lambda s: s._replace(conv=s.conv[:, :3]), "state.conv must be"),
        (lambda s: s._replace(recurrent=s.recurrent[:2]), "state.recurrent must be"),
        (lambda s: s._replace(latent=s.latent[:1]), "state.latent must be"),
        (lambda s: ModelState(*(t.repeat(2, 1, 1, *[1] * (t.dim() - 3)) for t in s)), "recurrent"),
        (lambda s: s._replace(recurrent=s.recurrent.bfloat16()), "torch.float32 .* torch.bfloat16"),
        (lambda s: s._replace(recurrent=s.recurrent.double()), "torch.float32 .* torch.float64"),
        (lambda s: s._replace(conv=s.conv.bfloat16()), "state.conv must be torch.float32"),
    ],
)
def test_a_state_of_another_model_is_refused_untouched(spoil, message):
    """BR-48: a recurrent state in bf16 would stall at half of what it should reach."""
    net = model(dtype=torch.float32)
    state = spoil(poisoned_state(net, slots=3, pages=6, page=4))
    sequence = Sequence(net, poisoned_state(net, slots=3, pages=6, page=4), 1, torch.tensor([3]))
    with pytest.raises(ValueError, match=message):
        net.forward_batch(batch_of(sequence, ids(2)), state)
    assert all(part.isnan().all() for part in state)


def test_replaying_tokens_whose_latent_rows_exist_leaves_those_rows_alone():
    """A joint boundary below the pages' hit: out_rows -1 runs the state over shared pages."""
    net = model()
    state = poisoned_state(net, slots=2, pages=6, page=4)
    text, pages = ids(20), torch.tensor([3, 1, 6, 2, 5])
    first = Sequence(net, state, 1, pages)
    expected = [first.run(part) for part in text.split(8)][-1]
    shared = state.latent.clone()
    again = Sequence(net, state, 2, pages)
    nowhere = torch.full((20,), -1)
    logits = net.forward_batch(batch_of(again, text, out_rows=nowhere), state)
    assert relative(logits[0], expected) < FLOAT64
    assert relative(state.recurrent[:, 2], state.recurrent[:, 1]) < FLOAT64
    assert torch.equal(state.latent.nan_to_num(7), shared.nan_to_num(7))


# --- dtypes ---------------------------------------------------------------------------------------


def test_state_dtypes_follow_the_model():
    for dtype, recurrent in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        state = poisoned_state(model(dtype=dtype), slots=1, pages=1, page=2)
        assert state.recurrent.dtype == recurrent
        assert state.conv.dtype == state.latent.dtype == dtype


@pytest.mark.parametrize(
    "name, seed, backend", [("nano", 0, "torch"), ("nano", 4, "native"), ("mini", 0, "native")]
)
def test_a_bf16_model_stays_close_to_the_float32_one(name, seed, backend):
    """Decision 11: same weights and expert choices, 3 % of the logits' own size; in pieces too."""
    half = model(name, torch.bfloat16, seed, backend=backend)
    single = model(name, torch.bfloat16, seed, backend=backend).float()
    text = ids(90, seed, half.config.vocab_size)
    choices = ExpertChoices(single)
    choices.tokens = torch.arange(90)
    with torch.inference_mode(), choices.recorded(single):
        whole = single(text[None])[0]
    with torch.inference_mode(), choices.forced(half):
        got = half(text[None])[0]
    assert got.dtype == torch.float32
    assert root_mean_square_error(got, whole) < 0.03
    pages = torch.arange(1, 13)
    sequence = Sequence(half, poisoned_state(half, slots=1, pages=12, page=8), 1, pages)
    with choices.forced(half):
        for choices.tokens in torch.arange(90).split(29):
            last = sequence.run(text[choices.tokens])
    assert root_mean_square_error(last, whole[-1]) < 0.03


def test_a_model_without_experts_and_one_without_attn_res_run():
    dense = dataclasses.replace(preset("nano"), first_k_dense_replace=5)
    plain = dataclasses.replace(preset("nano"), attn_res_block_size=None)
    for config in (dense, plain):
        net = KimiForCausalLM.from_config(config, seed=0, dtype=torch.float64)
        text = ids(20)
        sequence = Sequence(
            net, poisoned_state(net, slots=1, pages=5, page=4), 1, torch.arange(1, 6)
        )
        parts = [sequence.run(part) for part in text.split(7)]
        with torch.inference_mode():
            assert relative(parts[-1], net(text[None])[0, -1]) < FLOAT64


def test_tied_embeddings_stay_one_parameter_through_casts():
    config = dataclasses.replace(preset("nano"), tie_word_embeddings=True)
    net = KimiForCausalLM.from_config(config, seed=0)
    net = net.double().bfloat16()
    assert net.lm_head.weight is net.model.embed_tokens.weight


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_step_in_which_nothing_runs_gives_zeros_and_leaves_the_state_alone(backend):
    """A skipped row with tokens, and an empty row beside padding."""
    net = model(backend=backend)
    for query_start, slots in (([0, 2], [-1]), ([0, 0], [1])):
        state = poisoned_state(net, slots=1, pages=2, page=4)
        batch = ForwardBatch(
            token_ids=torch.tensor([5, 6]),
            query_start=torch.tensor(query_start),
            context_len=torch.tensor([0]),
            slots=torch.tensor(slots),
            page_table=torch.tensor([[-1]]),
            out_rows=torch.tensor([-1, -1]),
        )
        assert not net.forward_batch(batch, state).any()
        assert all(part.isnan().all() for part in state)
