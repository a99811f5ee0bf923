//! Context parallelism: the library's schedule of attention over ranks, as tuples for Python.

use std::ops::Range;

use flashcore::Mask;
use flashcore::distributed::{self, Heads, Order, Piece, Rows, Sequences, Variant};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::boundary::guard;
use crate::error;

/// A range of rows: first, and one past the last.
type Span = (usize, usize);
/// Ranks, each with ranges of its rows.
type Others = Vec<(usize, Vec<Span>)>;
/// The visible keys before and after a query (-1: unbounded), and blocks of (sequence, queries,
/// keys).
type Launch = ((i64, i64), Vec<(usize, Span, Span)>);
/// Rows received, rows sent, and the launches of a step.
type Step = (Others, Others, Vec<Launch>);

/// The distribution of attention over ranks.
#[pyclass(frozen, name = "Distribution", module = "flashcore._flashcore")]
pub(crate) struct Distribution(distributed::Distribution);

#[pymethods]
impl Distribution {
    /// Takes the number of ranks; the lengths of sequences; the batch size if all have one length,
    /// or None; the visible keys before and after a query, or None; the variant and its number of
    /// nodes; the order of rows; and query heads, key heads, head dim, value head dim and bytes of
    /// an element.
    #[new]
    #[pyo3(signature = (ranks, lengths, batch, window, variant, nodes, order, heads, /))]
    #[allow(clippy::too_many_arguments, reason = "read by position, from one place in Python")]
    fn new(
        ranks: usize,
        lengths: Vec<usize>,
        batch: Option<usize>,
        window: (Option<usize>, Option<usize>),
        variant: &str,
        nodes: usize,
        order: &str,
        heads: [usize; 5],
    ) -> PyResult<Self> {
        let variant = match variant {
            "ring" => Variant::Ring,
            "all_gather" => Variant::AllGather,
            "all_to_all" => Variant::AllToAll,
            "hybrid" => Variant::Hybrid { nodes },
            _ => {
                return Err(PyValueError::new_err(format!(
                    "variant is {variant:?}, expected \"ring\", \"all_gather\", \"all_to_all\" or \
                     \"hybrid\""
                )));
            }
        };
        let order = match order {
            "zigzag" => Order::ZigZag,
            "contiguous" => Order::Contiguous,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "order is {order:?}, expected \"zigzag\" or \"contiguous\""
                )));
            }
        };
        let sequences = match (batch, &lengths[..]) {
            (Some(count), &[length]) => Sequences::Batch { count, length },
            _ => Sequences::Ragged(lengths),
        };
        let [query, key, dim, value_dim, element_bytes] = heads;
        let heads = Heads { query, key, dim, value_dim, element_bytes };
        let mask = Mask::window(window.0, window.1);
        distributed::Distribution::new(ranks, sequences, mask, variant, order, heads)
            .map(Distribution)
            .map_err(error::value)
    }

    #[getter]
    fn nodes(&self) -> usize {
        self.0.nodes()
    }

    #[getter]
    fn members(&self) -> usize {
        self.0.members()
    }

    /// Returns whether an all-gather exchanges all rows.
    #[getter]
    fn gathers_all(&self) -> bool {
        self.0.gathers_all()
    }

    /// Returns the sequence and the rows of each piece that a rank owns.
    #[pyo3(signature = (rank, /))]
    fn pieces(&self, rank: usize) -> PyResult<Vec<(usize, Span)>> {
        guard(|| Ok(pieces(self.0.pieces(self.within(rank, self.0.ranks())?))))
    }

    /// Returns the rows that a member has once heads are exchanged for rows: the node that each
    /// range comes from, and the range in that node's rows.
    #[pyo3(signature = (member, /))]
    fn exchanged(&self, member: usize) -> PyResult<Vec<(usize, Span)>> {
        guard(|| {
            let rows = self.0.exchanged(self.within(member, self.0.members())?);
            Ok(rows.into_iter().map(|(node, rows)| (node, span(rows))).collect())
        })
    }

    /// Returns the range of query heads of a node, and the index of each of its key heads.
    #[pyo3(signature = (node, /))]
    fn heads(&self, node: usize) -> PyResult<(Span, Vec<usize>)> {
        guard(|| {
            let share = self.0.head_share(self.within(node, self.0.nodes())?);
            Ok((span(share.query), share.key))
        })
    }

    /// Returns the steps of a rank.
    #[pyo3(signature = (rank, /))]
    fn steps(&self, rank: usize) -> PyResult<Vec<Step>> {
        guard(|| {
            let steps = self.0.steps(self.within(rank, self.0.ranks())?);
            let step = |step: distributed::Step| {
                let launches = step.launches.into_iter().map(launch).collect();
                (others(step.receive), others(step.send), launches)
            };
            Ok(steps.into_iter().map(step).collect())
        })
    }

    /// Returns the gathered keys in order of position: the rank that sent them, and which of its
    /// rows.
    #[pyo3(signature = (rank, /))]
    fn gathered(&self, rank: usize) -> PyResult<Vec<(usize, Span)>> {
        guard(|| {
            let gathered = self.0.gathered(self.within(rank, self.0.ranks())?);
            Ok(gathered.into_iter().map(|it| (it.rank, span(it.rows))).collect())
        })
    }

    /// Returns the bytes that a rank sends in the forward and in the backward pass.
    #[pyo3(signature = (rank, /))]
    fn sent(&self, rank: usize) -> PyResult<(u64, u64)> {
        guard(|| {
            let volume = self.0.sent(self.within(rank, self.0.ranks())?);
            Ok((volume.forward, volume.backward))
        })
    }
}

impl Distribution {
    fn within(&self, index: usize, count: usize) -> PyResult<usize> {
        (index < count)
            .then_some(index)
            .ok_or_else(|| PyIndexError::new_err(format!("{index} is not one of {count}")))
    }
}

fn span(rows: Range<usize>) -> Span {
    (rows.start, rows.end)
}

fn pieces(pieces: Vec<Piece>) -> Vec<(usize, Span)> {
    pieces.into_iter().map(|piece| (piece.sequence, span(piece.rows))).collect()
}

fn others(others: Vec<Rows>) -> Others {
    let spans = |rows: Vec<Range<usize>>| rows.into_iter().map(span).collect();
    others.into_iter().map(|other| (other.rank, spans(other.rows))).collect()
}

fn launch(launch: distributed::Launch) -> Launch {
    let side = |keys: Option<usize>| keys.map_or(-1, |keys| i64::try_from(keys).unwrap_or(-1));
    let block = |block: distributed::Block| (block.sequence, span(block.queries), span(block.keys));
    let window = (side(launch.mask.left), side(launch.mask.right));
    (window, launch.blocks.into_iter().map(block).collect())
}
