# cython: language_level=3, boundscheck=False, wraparound=False, auto_pickle=False
"""Array kernels of pynixlkv: geometries and block tables in, programs and descriptor arrays out."""

from libc.stdint cimport int64_t, uint64_t
from libcpp.memory cimport make_unique, unique_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

import numpy as np


cdef extern from "bindings/py_error.hpp" namespace "pynixlkv::bindings":
    void set_py_error()


cdef extern from "<span>" nogil:
    cdef cppclass Words "std::span<const std::uint64_t>":
        Words()
        Words(const uint64_t*, size_t)

    cdef cppclass Ids "std::span<const std::int64_t>":
        Ids()
        Ids(const int64_t*, size_t)


cdef extern from "kv/region.hpp" namespace "pynixlkv::kv" nogil:
    cdef cppclass Geometry:
        @staticmethod
        Geometry from_words(Words) except +set_py_error


cdef extern from "kv/plan.hpp" namespace "pynixlkv::kv" nogil:
    cdef enum class Side:
        kLocal
        kRemote

    cdef cppclass Row "pynixlkv::Row":
        pass

    cdef cppclass Table:
        pass

    cdef cppclass Tables:
        Tables()
        Tables(const Table*, size_t)

    cdef cppclass Selection:
        @staticmethod
        Selection from_words(Words) except +set_py_error

    cdef cppclass Cover:
        uint64_t begin
        uint64_t end
        uint64_t[2] first
        uint64_t[2] last

    cdef cppclass Plan:
        @staticmethod
        Plan from_words(Words) except +set_py_error
        void check(Tables, Side) except +set_py_error
        Cover cover(size_t, const Table&) except +set_py_error
        vector[uint64_t] block_runs(size_t) except +set_py_error

    cdef cppclass Expansion:
        Expansion(const Plan&, Tables) except +set_py_error
        uint64_t bytes()
        size_t num_runs()
        size_t bound()
        size_t emit(Row*, Row*) except +set_py_error

    vector[Table] tables_from_flat(Ids, Ids) except +set_py_error
    vector[uint64_t] compile(
        const Geometry&, const Geometry&, const Selection&) except +set_py_error


cdef inline Words words_of(const uint64_t[::1] view) noexcept nogil:
    return Words(&view[0], view.shape[0]) if view.shape[0] else Words()


cdef inline Ids ids_of(const int64_t[::1] view) noexcept nogil:
    return Ids(&view[0], view.shape[0]) if view.shape[0] else Ids()


cdef inline Tables tables_of(const vector[Table]& tables) noexcept nogil:
    return Tables(tables.data(), tables.size())


cdef to_array(const vector[uint64_t]& words):
    cdef size_t i
    cdef uint64_t[::1] view
    array = np.empty(words.size(), np.uint64)
    view = array
    for i in range(words.size()):
        view[i] = words[i]
    return array


def check_geometry(const uint64_t[::1] geometry not None):
    """Raise LayoutError unless the words describe a geometry that can be used."""
    with nogil:
        Geometry.from_words(words_of(geometry))


def compile_plan(
    const uint64_t[::1] local not None,
    const uint64_t[::1] remote not None,
    const uint64_t[::1] selection not None,
):
    """Return the program that moves the selection between two geometries, as (n,) uint64."""
    cdef vector[uint64_t] words
    with nogil:
        words = compile(
            Geometry.from_words(words_of(local)),
            Geometry.from_words(words_of(remote)),
            Selection.from_words(words_of(selection)),
        )
    return to_array(words)


cdef class Program:
    """A checked program, ready to expand block tables. Immutable."""

    cdef unique_ptr[Plan] plan

    def __cinit__(self, const uint64_t[::1] words not None):
        with nogil:
            self.plan = make_unique[Plan](move(Plan.from_words(words_of(words))))

    def expand(self, const int64_t[::1] ids not None, const int64_t[::1] headers not None):
        """Return the rows of both sides, each (n, 3) uint64."""
        cdef vector[Table] tables
        cdef unique_ptr[Expansion] expansion
        cdef uint64_t[:, ::1] local_view
        cdef uint64_t[:, ::1] remote_view
        cdef size_t count = 0
        with nogil:
            tables = tables_from_flat(ids_of(ids), ids_of(headers))
            expansion.reset(new Expansion(self.plan.get()[0], tables_of(tables)))
        local = np.empty((expansion.get().bound(), 3), np.uint64)
        remote = np.empty((expansion.get().bound(), 3), np.uint64)
        if local.size:
            local_view = local
            remote_view = remote
            with nogil:
                count = expansion.get().emit(
                    <Row*>&local_view[0, 0], <Row*>&remote_view[0, 0])
                local_view = None
                remote_view = None
        # Gives back what merging has saved; nothing else refers to the arrays yet.
        local.resize((count, 3), refcheck=False)
        remote.resize((count, 3), refcheck=False)
        return local, remote

    def check(
        self,
        const int64_t[::1] ids not None,
        const int64_t[::1] headers not None,
        bint writes_remote,
    ):
        """Raise PlanError if the tables do not fit or a block would be written twice."""
        cdef vector[Table] tables
        with nogil:
            tables = tables_from_flat(ids_of(ids), ids_of(headers))
            self.plan.get().check(
                tables_of(tables), Side.kRemote if writes_remote else Side.kLocal)

    def totals(self, const int64_t[::1] ids not None, const int64_t[::1] headers not None):
        """Return bytes that the tables move, and their runs before merging and cutting."""
        cdef vector[Table] tables
        cdef unique_ptr[Expansion] expansion
        with nogil:
            tables = tables_from_flat(ids_of(ids), ids_of(headers))
            expansion.reset(new Expansion(self.plan.get()[0], tables_of(tables)))
        return expansion.get().bytes(), expansion.get().num_runs()

    def cover(
        self, size_t group, const int64_t[::1] ids not None, const int64_t[::1] headers not None
    ):
        """Return (begin, end, local first, local last, remote first, remote last) of one group."""
        cdef vector[Table] tables
        cdef Cover cover
        with nogil:
            tables = tables_from_flat(ids_of(ids), ids_of(headers))
            cover = self.plan.get().cover(group, tables.at(0))
        return (cover.begin, cover.end, cover.first[0], cover.last[0], cover.first[1],
                cover.last[1])

    def block_runs(self, size_t group):
        """Return the lengths in bytes of the runs of one block pair, (n,) uint64."""
        return to_array(self.plan.get().block_runs(group))
