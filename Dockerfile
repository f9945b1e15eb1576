FROM python:3.11-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[flower]" \
 && useradd --system --no-create-home tenure \
 && install -d -o tenure -g tenure -m 0700 /var/lib/tenure /keys
ENV PYTHONUNBUFFERED=1 \
    TENURE_STATE_DIR=/var/lib/tenure \
    TENURE_KEYS=/keys/keys.json
USER tenure
CMD ["tenure", "--help"]
