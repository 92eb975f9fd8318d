# A simulated server with vLLM's interface: docker build -t pagecast . && docker run -p 8000:8000 pagecast
FROM python:3.12-slim

WORKDIR /opt/pagecast
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY sim ./sim
COPY traces ./traces
COPY engine ./engine
COPY kernels ./kernels
COPY planner_app ./planner_app
RUN pip install --no-cache-dir -c constraints.txt '.[serve]' tokenizers jinja2 \
    && useradd --create-home --uid 1000 pagecast

USER pagecast
WORKDIR /home/pagecast
EXPOSE 8000
# Inside a container 127.0.0.1 would be reachable by nobody; what is published is said by `docker run -p`.
ENTRYPOINT ["pagecast", "serve", "--host", "0.0.0.0"]
CMD ["--simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "H200"]
