"""The table of a step by which the states of its requests are read and saved: slots, and after how many rows."""

from ..cache.pointers import RowPointer, TablePointer


@fieldwise_init
struct StepStates(TrivialRegisterPassable):
    """The table of a step of `requests` requests.

    Request b has rows `offsets[b]` to `offsets[b + 1]`. Its state is read from slot `sources[b]`, zeros where that is
    -1, and saved after `counts[s]` of its rows in slot `slots[s]`, for s from `save_offsets[b]` to
    `save_offsets[b + 1]`. A slot that is saved may be the source of the same request: it is read before.
    """

    var offsets: TablePointer
    var sources: RowPointer
    var save_offsets: TablePointer
    var counts: RowPointer
    var slots: RowPointer
    var requests: Int

    @always_inline
    def first_row(self, request: Int) -> Int:
        return Int(self.offsets[unsafe_offset=request])

    @always_inline
    def num_rows(self, request: Int) -> Int:
        return self.first_row(request + 1) - self.first_row(request)

    @always_inline
    def source(self, request: Int) -> Int:
        return Int(self.sources[unsafe_offset=request])

    @always_inline
    def first_save(self, request: Int) -> Int:
        return Int(self.save_offsets[unsafe_offset=request])

    @always_inline
    def end_save(self, request: Int) -> Int:
        return Int(self.save_offsets[unsafe_offset=request + 1])

    @always_inline
    def save_count(self, save: Int) -> Int:
        return Int(self.counts[unsafe_offset=save])

    @always_inline
    def save_slot(self, save: Int) -> Int:
        return Int(self.slots[unsafe_offset=save])

    @no_inline
    def check(self, rows: Int, saves: Int, available: Int) raises:
        """Refuses offsets that do not ascend within `rows` rows and `saves` saves, saves that do not ascend within
        their request's rows and end after the last of them, and slots that are none of `available`."""
        if self.first_row(0) != 0 or self.first_save(0) != 0:
            raise Error("row_offsets and save_offsets begin with 0")
        for request in range(self.requests):
            var count, save, end = self.num_rows(request), self.first_save(request), self.end_save(request)
            if count < 1 or self.first_row(request + 1) > rows:
                raise Error("row_offsets: request ", request, " has rows that are none of ", rows)
            if end <= save or end > saves:
                raise Error("save_offsets: request ", request, " has saves that are none of ", saves)
            var source = self.source(request)
            if source < -1 or source >= available:
                raise Error("sources: request ", request, " has slot ", source, ", there are ", available)
            var before = 0
            for at in range(save, end):
                if self.save_count(at) <= before or self.save_count(at) > count:
                    raise Error("save_counts: save ", at, " of request ", request, " is after ", self.save_count(at))
                before = self.save_count(at)
                if self.save_slot(at) < 0 or self.save_slot(at) >= available:
                    raise Error("save_slots: save ", at, " is slot ", self.save_slot(at), ", there are ", available)
            if before != count:
                raise Error("save_counts: request ", request, " is not saved after its last row")
