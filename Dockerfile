# The two commands of the README, and an image to train with. Not built yet where it was written, which has no Docker.
#
#   docker build --target demo -t commsched-demo . && docker run --rm --shm-size=2g commsched-demo     # make demo
#   docker build --target test -t commsched-test . && docker run --rm --shm-size=2g commsched-test     # make test
#   docker build --target train -t commsched .         # PyTorch, commsched and examples, as examples/kubernetes uses it
#
# Tests that shape links need more rights: docker run --privileged; without them they are skipped.

FROM python:3.11-bookworm AS base
RUN apt-get update \
  && apt-get install --no-install-recommends -y iproute2 make \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /commsched
COPY . .

FROM base AS demo
RUN make .venv/.installed-examples
CMD ["make", "demo"]

FROM base AS test
RUN make --jobs=2 .venv/.installed-dev environments
CMD ["make", "test"]

FROM base AS train
RUN pip install --no-cache-dir -c constraints-dev.txt ".[examples,tune]"
CMD ["commsched", "doctor"]
