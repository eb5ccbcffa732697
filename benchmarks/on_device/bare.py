"""The floor: onnxruntime and numpy alone, with the graphs and weights that the agent uses.

    python benchmarks/on_device/bare.py predict GRAPH.onnx WEIGHTS.npz SAMPLES.npz
    python benchmarks/on_device/bare.py adapt GRAPH.onnx WEIGHTS.npz SAMPLES.npz STEPS LR

SAMPLES.npz: ``x`` and, to adapt on, ``y``. onnxruntime's own settings, except for one thread and no telemetry.
"""

import os
import sys

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime


def session(graph: str, weights: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    with np.load(weights) as file:
        arrays = dict(file)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def main(what: str, graph: str, weights: str, samples: str, *how: str) -> None:
    ready = session(graph, weights)
    with np.load(samples) as file:
        data = dict(file)
    if what == "predict":
        return print(ready.run(None, {"x": data["x"]})[0].argmax(1).tolist())
    steps, lr = np.array(int(how[0])), np.array(float(how[1]), np.float32)
    adapted = ready.run(None, {"support_x": data["x"], "support_y": data["y"], "steps": steps, "lr": lr})
    print(float(np.abs(adapted[0]).max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
