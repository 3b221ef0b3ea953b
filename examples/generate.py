"""What scripts/generate.py does, in ten lines: python examples/generate.py."""

from kimi_mini import Engine, KimiForCausalLM, SamplingParams, preset

model = KimiForCausalLM.from_config(preset("mini"), seed=0)
engine = Engine(model, state_slots=4, kv_pages=64)  # or Engine.from_pretrained("folder")
params = SamplingParams(temperature=0, max_tokens=64)

for delta in engine.stream("A prefix is pages you can cut and a state you cannot. ", params):
    print(delta.text, end="", flush=True)
print()

for output in engine.generate(["one prompt", "another, at the same time"], params):
    print(output.outputs[0].finish_reason, output.outputs[0].token_ids)
