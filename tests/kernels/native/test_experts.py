"""The native router and experts: near their torch twins, and nothing but the token."""

import pytest
import torch

from kernels.experts import mix_experts
from kernels.glu import GLUForm
from kernels.native.layers import NATIVE
from kernels.native.library import operators
from kernels.routing import RouterRule, Routing, route

pytestmark = pytest.mark.needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SITU = GLUForm(True, 4.0, 25.0)
# experts, choices, hidden, L, I: nothing even; whole vectors; one of everything
SHAPES = [(8, 3, 40, 24, 7), (16, 4, 128, 64, 96), (1, 1, 1, 1, 1)]
# no token, fewer than share a row of a matrix, more, several pieces of an expert
TOKENS = [0, 1, 3, 9, 150]


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def router(E, hidden, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    return drawn(E, hidden, dtype=dtype) / hidden**0.5, 0.1 * torch.randn(E, dtype=wide)


def experts(E, k, L, inner, N, dtype):
    """x, routing, w13 and w2."""
    chosen = torch.rand(N, E).argsort(1)[:, :k]
    weights = torch.rand(N, k, dtype=torch.promote_types(dtype, torch.float32))
    w13, w2 = drawn(E, 2 * inner, L) / L**0.5, drawn(E, L, inner) / inner**0.5
    return drawn(N, L, dtype=dtype), Routing(chosen, weights), w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_are_their_twin_in_float64(shape, N, dtype):
    E, k, _, L, inner = shape
    x, routing, w13, w2 = experts(E, k, L, inner, N, dtype)
    got = NATIVE.mix_experts(x, routing, w13, w2, SITU)
    doubled = Routing(routing.experts, routing.weights.double())
    true = mix_experts(x.double(), doubled, w13.double(), w2.double(), SITU)
    assert got.dtype == routing.weights.dtype and got.shape == true.shape
    near = 1e-13 if dtype == torch.float64 else 2e-6  # nothing is rounded to bfloat16 on the way
    assert ((got - true).abs() <= near * true.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("form", [GLUForm(True), GLUForm(False)], ids=["SiTU", "SwiGLU"])
def test_experts_take_every_activation(form):
    given = experts(8, 3, 24, 7, 5, torch.float32)
    expected = mix_experts(*given, form)
    torch.testing.assert_close(NATIVE.mix_experts(*given, form), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule", [RouterRule(3), RouterRule(2, 4, 2), RouterRule(3, 1, 1, False, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", TOKENS)
def test_the_router_is_its_twin(N, dtype, rule):
    weight, bias = router(8, 40, dtype)
    x = drawn(N, 40, dtype=dtype)
    got, expected = NATIVE.route(x, weight, bias, rule), route(x, weight, bias, rule)
    near = 1e-13 if dtype == torch.float64 else 1e-6
    assert got.experts.dtype == torch.long and got.weights.dtype == bias.dtype
    assert torch.equal(got.experts, expected.experts)
    torch.testing.assert_close(got.weights, expected.weights, rtol=near, atol=0)
    forced = torch.rand(N, 8).argsort(1)[:, : rule.top_k]
    got = NATIVE.route(x, weight, bias, rule, forced)
    assert torch.equal(got.experts, forced)
    expected = route(x, weight, bias, rule, forced)
    torch.testing.assert_close(got.weights, expected.weights, rtol=near, atol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_scores_go_to_the_lowest_expert(groups):
    rule = RouterRule(3, groups, max(1, groups // 2))
    got = NATIVE.route(torch.zeros(5, 4), torch.zeros(16, 4), torch.zeros(16), rule)
    assert got.experts.tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("groups", [1, 4])
def test_choices_among_few_scores_are_the_twins(groups):
    """Ties everywhere: a bias of three values decides."""
    rule = RouterRule(4, groups, max(1, groups // 2))
    for _ in range(50):
        bias = torch.randint(3, (16,)).float()
        if groups == 1:
            bias[torch.randint(16, (6,))] = -torch.inf
        given = torch.zeros(1, 4), torch.zeros(16, 4), bias, rule
        assert torch.equal(NATIVE.route(*given).experts, route(*given).experts)


def test_too_few_experts_are_refused_as_by_the_twin():
    bias = torch.full((8,), -torch.inf)
    bias[[2, 5]] = 0
    x, weight = torch.zeros(3, 4), torch.zeros(8, 4)
    assert NATIVE.route(x, weight, bias, RouterRule(2)).experts.tolist() == [[2, 5]] * 3
    with pytest.raises(ValueError, match="fewer than 3 experts have a score above -inf"):
        NATIVE.route(x, weight, bias, RouterRule(3))


def test_what_is_not_a_number_is_chosen_first_as_by_the_twin():
    x, (weight, bias) = drawn(3, 40), router(8, 40, torch.float32)
    bias[6] = weight[3, 5] = torch.nan
    x[1] = torch.nan
    got, expected = (f(x, weight, bias, RouterRule(3)) for f in (NATIVE.route, route))
    assert torch.equal(got.experts, expected.experts)
    assert torch.equal(got.weights.isnan(), expected.weights.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_and_threads_change_no_bit_of_a_token(dtype, threads):
    N = 300
    x, routing, w13, w2 = experts(4, 2, 72, 96, N, dtype)
    weight, bias = router(16, 72, dtype)
    mixed = NATIVE.mix_experts(x, routing, w13, w2, SITU)
    routed = NATIVE.route(x, weight, bias, RouterRule(4))
    for count in (1, 2, 5):
        threads(count)
        for rows in (slice(0, N), slice(7, 8), slice(40, 49), slice(100, 299)):
            part = Routing(*(each[rows] for each in routing))
            assert torch.equal(NATIVE.mix_experts(x[rows], part, w13, w2, SITU), mixed[rows])
            alone = NATIVE.route(x[rows], weight, bias, RouterRule(4))
            assert torch.equal(alone.experts, routed.experts[rows])
            assert torch.equal(alone.weights, routed.weights[rows])


def test_gradients_and_float16_are_the_twins():
    x, routing, w13, w2 = experts(8, 3, 24, 7, 5, torch.float32)
    weight, bias = router(8, 24, torch.float32)
    x.requires_grad_()
    out = NATIVE.mix_experts(x, routing, w13, w2, SITU)
    chosen = NATIVE.route(x, weight, bias, RouterRule(3))
    assert torch.equal(out, mix_experts(x, routing, w13, w2, SITU))
    (out.sum() + chosen.weights.sum()).backward()
    assert x.grad.isfinite().all()
    halves = x.detach().half(), weight.half(), bias.half(), RouterRule(3)
    assert torch.equal(NATIVE.route(*halves).weights, route(*halves).weights)


def fits():
    choices, weights = torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 2)
    matrices = dict(w13=torch.ones(3, 10, 4), w2=torch.ones(3, 4, 5))
    glu = dict(situ=True, beta=4.0, linear_beta=None)
    route = dict(x=torch.ones(2, 4), weight=torch.ones(6, 4), bias=torch.ones(6), top_k=2,
                 groups=2, kept_groups=1, renormalise=True, factor=1.0, experts=None)  # fmt: skip
    return {
        "route": route,
        "mix_experts": dict(x=torch.ones(2, 4), experts=choices, weights=weights) | matrices | glu,
    }


REFUSED = [
    ("route", dict(weight=torch.ones(6, 5)), "weight must be [6, 4]"),
    ("route", dict(weight=torch.ones(6)), "x and weight must have two axes"),
    ("route", dict(weight=torch.ones(6, 4).double()), "must both be Double or neither"),
    ("route", dict(bias=torch.ones(5)), "bias must be [6]"),
    ("route", dict(top_k=0), "top_k must be 1..6, got 0"),
    ("route", dict(top_k=7), "top_k must be 1..6, got 7"),
    ("route", dict(groups=4), "groups must divide 6 experts"),
    ("route", dict(kept_groups=3), "kept_groups be 1..groups; got 2 and 3"),
    ("route", dict(experts=torch.tensor([[0, 6], [0, 1]])), "experts names expert 6 of 0..5"),
    ("route", dict(experts=torch.zeros(2, 3).long()), "experts must be [2, 2]"),
    ("mix_experts", dict(x=torch.ones(2, 5)), "w13 must be [3, 10, 5]"),
    ("mix_experts", dict(w2=torch.ones(3, 4)), "x, w2 and experts must have two, three and two"),
    ("mix_experts", dict(w2=torch.ones(3, 4, 6)), "w13 must be [3, 12, 4]"),
    ("mix_experts", dict(w13=torch.ones(3, 4, 10).mT), "w13 and w2 must be contiguous"),
    ("mix_experts", dict(w13=torch.ones(3, 10, 4).double()), "w13 must be Float"),
    ("mix_experts", dict(experts=torch.tensor([[0, 1], [-1, 2]])), "names expert -1 of 0..2"),
    ("mix_experts", dict(experts=torch.ones(2, 2)), "experts must be Long"),
    ("mix_experts", dict(weights=torch.ones(2, 1)), "weights must be [2, 2]"),
    ("mix_experts", dict(weights=torch.ones(2, 2).double()), "weights must be Float"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(name, change, message):
    with pytest.raises(ValueError) as refused:
        getattr(operators(), name)(**fits()[name] | change)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["route", "mix_experts"])
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(name):
    operator = getattr(operators(), name).default
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, tuple(fits()[name].values()), test_utils=utilities)
