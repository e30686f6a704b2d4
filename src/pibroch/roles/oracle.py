"""A central oracle: it plans for all trainers which rows travel when."""

from pibroch.roles.role import Role

ROLE = Role(
    title="oracle",
    worker="oracle",
    command="oracle",
    functions="pibroch.servers.plan_service",
    block=3,
    folder="oracle",
    serving="pibroch.servers:serve_plans",
    is_one=True,  # it has a thread for each trainer
    restarts=10,  # trainers can send it again what it kept
    help="""Plan for all trainers which rows travel when.

    With the exchange `lookahead` each trainer plans for itself, from the ids of all. One oracle for
    all takes that work from them, and sends each its plan: less computing on trainers, more bytes.
    It stays until it is stopped, and serves one training run after the other. On one machine
    `pibroch train` starts it by itself: --set embedding.exchange.oracle=central. On several:

    on 10.0.0.5: pibroch oracle --rendezvous tcp://10.0.0.5:29600

    trainers: pibroch train ... --set embedding.exchange=lookahead --set
    embedding.exchange.oracle=central --set embedding.exchange.rendezvous=tcp://10.0.0.5:29600

    Where a run has embedding servers too, all meet at one place: give server 0's address
    everywhere, and the oracle --with-servers. Secret and TLS are as for `pibroch embedding-server`.
    """,
)
