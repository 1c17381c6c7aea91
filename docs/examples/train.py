"""A trainer in plain torch: python train.py [steps]. Publishes its weights after each step."""

import sys
import time
import uuid

import torch
import toy

import refitd

network = toy.model()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
weights = network.state_dict(keep_vars=True)  # name -> live tensor

trainer = refitd.connect_trainer(job="quickstart", run=uuid.uuid4().hex[:8], rank=0, world_size=1)
trainer.register(refitd.Layout.from_module(network))  # names, shapes, dtypes: once

# Engines begin with the trainer's weights: offer them until one has them.
while not trainer.publish(0, weights).committed(timeout=10).committed:
    print("no engine has step 0 yet", flush=True)
    time.sleep(1)

for step in range(1, int(sys.argv[1]) + 1 if len(sys.argv) > 1 else 6):
    optimizer.zero_grad()
    toy.loss(network).backward()
    optimizer.step()
    offer = trainer.publish(step, weights)  # live tensors
    if offer.released(timeout=30) is refitd.SKIPPED:  # either way they may change again
        print(f"step {step} was not taken: {offer.reason}")
    report = offer.committed(timeout=60)  # wait here, or ask later, or never
    print(f"step {step} is with {report.committed}, checksum {toy.checksum(weights.values())!r}", flush=True)
trainer.close()
