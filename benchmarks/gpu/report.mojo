"""Times graphs in alternation, prints CSV rows, and holds them to the aims."""

from max.gpu.host import DeviceContext, DeviceGraph

comptime OURS = "kpool_graph"
comptime IN_TREE = "in_tree"
comptime COPY = "copy"
comptime EMPTY = "empty"
comptime _SAMPLES = 31
comptime _WARM_UPS = 3
# Two medians of the same work differ by this much.
comptime _NOISE = 1.02


@fieldwise_init
struct Workload(Copyable, Movable):
    """What is run, whoever runs it."""

    var op: String
    """The op."""
    var detail: String
    """What its rows do."""
    var kpool: Int
    """Tokens per pool."""
    var next_n: Int
    """Tokens a row brings; 0 where chunks vary."""
    var requests: Int
    """Requests, or batch rows."""
    var tokens: Int
    """Tokens in the call."""
    var bytes: Int
    """Bytes that must be read and written."""


@fieldwise_init
struct Row(Copyable, Movable):
    """One provider's times of one case, in nanoseconds a launch."""

    var provider: String
    """Who ran it."""
    var median: Float64
    """The middle one."""
    var p20: Float64
    """A fifth of the samples are below."""
    var p80: Float64
    """A fifth of the samples are above."""


struct Entrant(Movable):
    """A provider's graph."""

    var provider: String
    """The provider."""
    var graph: DeviceGraph
    """Its launches."""

    def __init__(out self, provider: String, var graph: DeviceGraph):
        self.provider = provider
        self.graph = graph^


struct Report:
    """Prints rows as they are measured and collects what became of the aims."""

    var verdicts: List[String]
    """A line an aim and case."""

    def __init__(out self):
        self.verdicts = []
        print(
            "op,detail,kpool,next_n,requests,tokens,bytes,provider,launches,",
            "copies,samples,median_ns,p20_ns,p80_ns,over_in_tree,over_copy,",
            "over_empty",
            sep="",
        )

    def race(
        mut self,
        ctx: DeviceContext,
        load: Workload,
        entrants: List[Entrant],
        launches: Int,
        copies: Int,
    ) raises:
        """Times every provider's graph, one after the other in each round.

        Args:
            ctx: The device.
            load: What they run.
            entrants: The providers, verified.
            launches: Launches in a graph.
            copies: Copies of the operands they rotate over.
        """
        var samples = List[List[Float64]]()
        for _ in range(len(entrants)):
            samples.append([])
        for round in range(_WARM_UPS + _SAMPLES):
            for i in range(len(entrants)):
                ref graph = entrants[i].graph

                def replay() raises {imm}:
                    graph.replay()

                var time = ctx.execution_time(replay, 1)
                if round >= _WARM_UPS:
                    samples[i].append(Float64(time) / Float64(launches))
        var rows = List[Row]()
        for i in range(len(entrants)):
            sort(samples[i])
            rows.append(
                Row(
                    entrants[i].provider,
                    samples[i][_SAMPLES // 2],
                    samples[i][_SAMPLES // 5],
                    samples[i][_SAMPLES - 1 - _SAMPLES // 5],
                )
            )
        for row in rows:
            print(
                load.op,
                load.detail,
                load.kpool,
                load.next_n,
                load.requests,
                load.tokens,
                load.bytes,
                row.provider,
                launches,
                copies,
                _SAMPLES,
                round(row.median, 1),
                round(row.p20, 1),
                round(row.p80, 1),
                _over(rows, row.median, IN_TREE),
                _over(rows, row.median, COPY),
                _over(rows, row.median, EMPTY),
                sep=",",
            )
        self.judge(load, rows)

    def judge(mut self, load: Workload, rows: List[Row]):
        """Holds a case to the aims that it is meant for.

        Args:
            load: The case.
            rows: Its rows.
        """
        var ours = _median(rows, OURS)
        var in_tree = _median(rows, IN_TREE)
        self.aim(load, "time over in-tree", ours / in_tree, _NOISE)
        if load.op == "compress" and load.tokens > 100_000 and load.kpool == 4:
            if load.requests == 64:
                self.aim(load, "time over in-tree", ours / in_tree, 0.25)
                self.aim(
                    load, "time over a copy", ours / _median(rows, COPY), 1.1
                )
        if load.op == "tail_update" and load.requests <= 128:
            self.aim(
                load,
                "time over an empty launch",
                ours / _median(rows, EMPTY),
                1.15,
            )

    def aim(
        mut self, load: Workload, what: String, got: Float64, limit: Float64
    ):
        """Notes whether one ratio is within its limit.

        Args:
            load: The case.
            what: The ratio.
            got: Its value.
            limit: Its limit.
        """
        self.verdicts.append(
            String(
                "met" if got <= limit else "MISSED",
                ": ",
                load.op,
                " ",
                load.detail,
                " kpool=",
                load.kpool,
                " next_n=",
                load.next_n,
                " requests=",
                load.requests,
                " tokens=",
                load.tokens,
                ": ",
                what,
                " ",
                round(got, 3),
                ", at most ",
                limit,
            )
        )

    def close(self):
        """Prints the verdicts."""
        var missed = 0
        for verdict in self.verdicts:
            print("#", verdict)
            missed += Int(verdict.startswith("MISSED"))
        print("#", len(self.verdicts) - missed, "aims met,", missed, "missed")


def _median(rows: List[Row], provider: StaticString) -> Float64:
    for row in rows:
        if row.provider == provider:
            return row.median
    return 0


def _over(rows: List[Row], median: Float64, provider: StaticString) -> Float64:
    return round(median / _median(rows, provider), 3)
