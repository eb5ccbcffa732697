"""The workload's step as a client script: whole weights in one array, down and up."""

import nvflare.client as flare

from benchmarks.overhead.step import BATCH, Step


def main() -> None:
    flare.init()
    step = Step(int(flare.get_site_name().removeprefix("d")))
    while flare.is_running():
        model = flare.receive()
        params = {name: step.take(weights) for name, weights in model.params.items()}
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": BATCH}))


if __name__ == "__main__":
    main()
