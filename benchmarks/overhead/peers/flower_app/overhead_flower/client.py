"""The workload's step as a ClientApp: whole weights in one array, down and up."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.overhead.step import BATCH, Step

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    after = Step(int(context.node_config["device"])).take(weights)
    content = RecordDict({"arrays": ArrayRecord([after]), "metrics": MetricRecord({"num-examples": BATCH})})
    return Message(content=content, reply_to=message)
