//! Host memory, by the library's CPU back end.
//!
//! Tensors are read in place, unless their elements are not aligned. Unlike a device, the host sees all
//! lists: nonsense in them is refused.

use flashcore::quantize;
use flashcore::serving::{self, Pages, Placement, Sequences};
use flashcore::{
    Backend, Backward, Cancellation, CpuBackend, DType, Descale, Inputs, Layout, Problem, Report,
    RunOptions, Shape, Tensor, TensorView,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::boundary::{collect, room_for};
use crate::error;
use crate::gradient;
use crate::parts::Parts;
use crate::request::Request;
use crate::update::{NAMES, Update};
use crate::view::{self, Form, Memory, View, contiguous};

/// Attention; waits for the answer.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile, `output` of memory for its
/// output and `lse`, if any, memory for the problem's rows. Nobody else may use those two.
pub(crate) unsafe fn attend(
    request: &Request,
    problem: &Problem,
    output: &View,
    lse: Option<u64>,
    cancellation: &Cancellation,
) -> PyResult<Report> {
    let run = |problem: &Problem, inputs: Inputs<'_>, _: Option<&Placement>| {
        let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
        CpuBackend::new().run(problem, inputs, &options).map_err(error::library)
    };
    // SAFETY: the caller's promise, here and below.
    let result = unsafe { with_inputs(request, problem, run)? };
    // SAFETY: the same; the results were made here.
    unsafe {
        write(&result.output, output);
        if let Some(lse) = lse {
            std::ptr::copy_nonoverlapping(result.lse.as_ptr(), lse as *mut f32, result.lse.len());
        }
    }
    Ok(result.report)
}

/// Gradients of attention; waits for them. Rows of keys that no sequence has are not written.
///
/// # Safety
///
/// The call must be of host memory that stays as it is meanwhile. Nobody else may use the memory
/// of its gradients.
pub(crate) unsafe fn differentiate(
    call: &gradient::Backward,
    problem: &Problem,
    cancellation: &Cancellation,
) -> PyResult<Report> {
    let shape = problem.output_shape();
    // SAFETY: the caller's promise, here and below.
    let copy = |view| unsafe { copy(shape, view) };
    let (output, output_gradient) = (copy(&call.output)?, copy(&call.output_gradient)?);
    // SAFETY: the same.
    let lse = unsafe { list::<f32>(&call.lse)? };
    let run = |problem: &Problem, inputs: Inputs<'_>, keys: Option<&Placement>| {
        let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
        let (output, output_gradient) = (&output, &output_gradient);
        let backward = Backward { inputs, output, lse: &lse, output_gradient };
        let gradients = CpuBackend::new().run_backward(problem, backward, &options);
        let gradients = gradients.map_err(error::library)?;
        let [query, key, value] = &call.gradients;
        // SAFETY: as above; the placement is inside of the keys.
        unsafe {
            write(&gradients.query, query);
            for (gradient, to) in [(&gradients.key, key), (&gradients.value, value)] {
                match keys {
                    Some(placement) => write_placed(gradient, to, placement),
                    None => write(gradient, to),
                }
            }
            if let (Some(sinks), Some(to)) = (&gradients.sinks, &call.sinks) {
                std::ptr::copy_nonoverlapping(sinks.as_ptr(), to.address as *mut f32, sinks.len());
            }
        }
        Ok(gradients.report)
    };
    // SAFETY: as above.
    unsafe { with_inputs(&call.request, problem, run) }
}

/// Hands the tensors of a call to `run`, with the problem that they pose, and the placement of its keys
/// where sequences have lengths of their own.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile.
unsafe fn with_inputs<T>(
    request: &Request,
    problem: &Problem,
    run: impl FnOnce(&Problem, Inputs<'_>, Option<&Placement>) -> PyResult<T>,
) -> PyResult<T> {
    // SAFETY: the caller's promise, here and below.
    let floats = |memory: Option<&Memory>| unsafe { optional::<f32>(memory) };
    let (slopes, sinks) = (floats(request.slopes.as_deref())?, floats(request.sinks.as_deref())?);
    // SAFETY: the same.
    let captured = unsafe { request.captured.on_host() };
    // SAFETY: the same.
    let lend = |shape, view: &View| unsafe { lend(shape, view) };
    let factors = request.descales(problem)?.zip(problem.descale_shapes());
    let factors = factors.try_map(|(view, shape)| match (view, shape) {
        (Some(view), Some(shape)) => lend(shape, &view).map(Some),
        _ => Ok(None),
    })?;
    let query = lend(problem.query_shape(), &request.query)?;
    let key = lend(problem.key_shape(), &request.key)?;
    let value = lend(problem.value_shape(), &request.value)?;
    let inputs = Inputs {
        slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        captured: &captured,
        descales: factors.each_ref().map(|factors| factors.as_ref().map(Lent::view)),
        ..Inputs::new(query.view(), key.view(), value.view())
    };
    if problem.has_equal_lengths() {
        return run(problem, inputs, None);
    }
    // SAFETY: as above; the placements are inside of the tensors.
    let (queries, keys) = unsafe { placements(request, problem)? };
    let sequences = Sequences::new(problem.clone(), queries, keys).map_err(error::value)?;
    let (problem, inputs) = sequences.over(inputs).map_err(error::library)?;
    run(&problem, inputs, Some(sequences.keys()))
}

/// A tensor of the caller's, or a copy if its elements are not aligned.
enum Lent<'a> {
    View(TensorView<'a>),
    Copy(Tensor),
}

impl Lent<'_> {
    fn view(&self) -> TensorView<'_> {
        match self {
            Lent::View(view) => *view,
            Lent::Copy(tensor) => tensor.view(),
        }
    }
}

/// Lends the memory of a view.
///
/// # Safety
///
/// The view must be of memory that stays as it is while it is lent.
unsafe fn lend<'a>(shape: Shape, view: &View) -> PyResult<Lent<'a>> {
    let wrong = |error: flashcore::TensorError| error::library(error.into());
    let layout = Layout::strided(shape, view::strides(view.form.strides)).map_err(wrong)?;
    // SAFETY: the layout's span is what its last element needs; it is in memory, so that its bytes
    // can be counted.
    let memory = unsafe { slice(view.address, layout.span() * view.form.dtype.bytes()) };
    match TensorView::of_bytes(view.form.dtype, layout, memory) {
        Some(view) => view.map(Lent::View).map_err(wrong),
        None => Tensor::from_bytes(view.form.dtype, layout, memory).map(Lent::Copy).map_err(wrong),
    }
}

/// Where the queries and the keys of a call are.
///
/// # Safety
///
/// The request must be of host memory.
unsafe fn placements(request: &Request, problem: &Problem) -> PyResult<(Placement, Placement)> {
    // SAFETY: the caller's promise.
    let integers = |memory: Option<&Memory>| unsafe { optional::<i32>(memory) };
    let [q, k, _, cu_q, cu_k, used_q, used_k, leftpad, index, table, ..] = *request.names();
    let count = problem.batch;
    let [most_queries, most_keys] = request.most_names();
    let queries = Rows { name: q, form: &request.query.form, count }.placement(
        (cu_q, integers(request.query_starts.as_deref())?),
        (used_q, integers(request.query_lengths.as_deref())?),
        ("queries", most_queries, problem.query_length),
    )?;
    let (form, room) = (&request.key.form, problem.key_length);
    let (starts, lengths) =
        (integers(request.key_starts.as_deref())?, integers(request.key_lengths.as_deref())?);
    let keys = if starts.is_some() {
        let most = ("keys", most_keys, room);
        Rows { name: k, form, count }.placement((cu_k, starts), (used_k, lengths), most)?
    } else {
        let ends = match lengths {
            Some(lengths) => lengths_within(used_k, &lengths, |_| room)?,
            None => repeated(room, count)?,
        };
        let lists = (integers(request.entries.as_deref())?, integers(request.pages.as_deref())?);
        in_cache(form, ends, lists, [k, index, table])?
    };
    let keys = match integers(request.left_padding.as_deref())? {
        None => keys,
        Some(skipped) => {
            let skipped = lengths_within(leftpad, &skipped, |at| keys.ends()[at])?;
            keys.with_left_padding(skipped)
        }
    };
    Ok((queries, keys))
}

/// Writes new keys and values into a cache, the new lengths to `after`, and queries rotated as its
/// keys are to `rotated`.
///
/// # Safety
///
/// The update must be of host memory, of which nobody else uses the caches meanwhile; `after`
/// memory for a list, `rotated` for the queries where there is an embedding.
pub(crate) unsafe fn append(
    update: &Update,
    rotated: Option<u64>,
    after: u64,
    cancellation: &Cancellation,
) -> PyResult<()> {
    // SAFETY: the caller's promise, here and below.
    let integers = |memory: Option<&Memory>| unsafe { optional::<i32>(memory) };
    let (count, room) = (update.sequences, update.room);
    // SAFETY: the same.
    let lengths = lengths_within(NAMES[5], &unsafe { list(&update.lengths)? }, |_| room)?;
    let rows = |name, view: &View, starts: Option<&Memory>, list| {
        let form = &view.form;
        let most = ("rows", name, form.sizes[1] as usize);
        Rows { name, form, count }.placement((list, integers(starts)?), ("", None), most)
    };
    let new = rows(NAMES[2], &update.key, update.key_starts.as_ref(), NAMES[6])?;
    let mut grown = room_for(count)?;
    for (sequence, length) in lengths.iter().enumerate() {
        let added = new.length(sequence);
        if length + added > room {
            return Err(PyValueError::new_err(format!(
                "k has {added} rows for sequence {sequence} behind the {length} there are, \
                 expected no more than the {room} positions of k_cache"
            )));
        }
        grown.push(length + added);
    }
    let lists = (integers(update.entries.as_ref())?, integers(update.pages.as_ref())?);
    let cache =
        in_cache(&update.key_cache.form, grown, lists, [NAMES[0], NAMES[8], update.pages_name])?;

    // SAFETY: as above.
    let gather = |view: &View, rows: &Placement| unsafe { gather(view, rows, cancellation) };
    let (mut key, value) = (gather(&update.key, &new)?, gather(&update.value, &new)?);
    let key_type = key.dtype();
    if update.rotary.is_some() && key_type != update.key_cache.form.dtype {
        // Rounded once, after it is rotated.
        key = wide(&key)?;
    }
    if let Some(rotary) = &update.rotary {
        let (positions, dim) = rotary.sizes();
        // SAFETY: as above.
        let (cosines, sines) =
            unsafe { (floats(&rotary.cosines, key_type)?, floats(&rotary.sines, key_type)?) };
        let turn = serving::Rotary {
            dim,
            interleaved: rotary.interleaved,
            cosines: &cosines,
            sines: &sines,
        };
        let first = match integers(rotary.positions.as_ref())? {
            Some(list) => lengths_within(NAMES[12], &list, |_| positions)?,
            None => lengths,
        };
        let rotate = |tensor: &Tensor, rows: &Placement, advancing: bool| {
            let mut at = room_for(tensor.shape().length)?;
            for (sequence, first) in first.iter().enumerate() {
                let step = usize::from(advancing);
                at.extend((0..rows.length(sequence)).map(|index| first + step * index));
            }
            if let Some(position) = at.iter().find(|position| **position >= positions) {
                return Err(PyValueError::new_err(format!(
                    "rotary_cos has {positions} positions, expected more than {position}"
                )));
            }
            turn.rotate(tensor, &at).map_err(error::library)
        };
        key = rotate(&key, &new, true)?;
        if let Some(address) = rotated {
            let queries = rows(NAMES[4], &update.query, update.query_starts.as_ref(), NAMES[7])?;
            let query = rotate(&gather(&update.query, &queries)?, &queries, rotary.advancing)?;
            let sizes = update.query.form.sizes;
            let form = Form { sizes, strides: contiguous(sizes), ..update.query.form };
            // SAFETY: as above.
            unsafe { scatter(&query, &View { address, form }, &queries) };
        }
    }
    for (name, tensor, to, descale) in [
        (NAMES[13], key, &update.key_cache, &update.descales[0]),
        (NAMES[14], value, &update.value_cache, &update.descales[1]),
    ] {
        let tensor = match tensor.dtype() == to.form.dtype {
            true => tensor,
            // SAFETY: as above.
            false => unsafe { rounded(name, &tensor, to, descale, (&cache, &new))? },
        };
        let mut from = vectors(&tensor);
        for sequence in 0..count {
            let before = cache.length(sequence) - new.length(sequence);
            for index in 0..new.length(sequence) {
                let place = cache.locate(sequence, before + index);
                // SAFETY: as above; the place is inside of the cache.
                unsafe { copy_row(&mut from, to, place) };
            }
        }
    }
    for (sequence, end) in cache.ends().iter().enumerate() {
        // SAFETY: as above. Lengths were 32 bits before, and are at most the room.
        unsafe { *(after as *mut i32).add(sequence) = *end as i32 };
    }
    Ok(())
}

/// New rows, sequence after sequence, as an 8-bit cache has them. Factors of tokens are found and
/// written to where the rows will be.
///
/// # Safety
///
/// The factors must be of host memory, which nobody else uses meanwhile where they are written; the
/// placement of the cache, with the new rows, must be inside of it.
unsafe fn rounded(
    name: &str,
    tensor: &Tensor,
    to: &View,
    descale: &Option<(Descale, View)>,
    (cache, new): (&Placement, &Placement),
) -> PyResult<Tensor> {
    let dtype = to.form.dtype;
    let wrong = |error: flashcore::TensorError| error::library(error.into());
    let mut small = Tensor::zeros(dtype, tensor.shape()).map_err(wrong)?;
    let mut row = vec![0.0; tensor.shape().dim];
    let mut index = 0;
    for sequence in 0..new.sequences() {
        let before = cache.length(sequence) - new.length(sequence);
        for position in 0..new.length(sequence) {
            for head in 0..tensor.shape().heads {
                tensor.head(0, head).read(index, &mut row);
                let factor = match descale {
                    None => 1.0,
                    Some((Descale::PerToken, view)) => {
                        let found = quantize::row_factor(&row, dtype);
                        let place = cache.locate(sequence, before + position);
                        // SAFETY: the caller's promise.
                        unsafe { *(vector(view, place, head) as *mut f32) = found };
                        found
                    }
                    Some((_, view)) => {
                        // SAFETY: the caller's promise.
                        unsafe { *(vector(view, (sequence, 0), head) as *const f32) }
                    }
                };
                if !(factor.is_finite() && factor != 0.0) {
                    return Err(PyValueError::new_err(format!(
                        "{name} has {factor} for sequence {sequence} and head {head}, expected a \
                         finite number other than zero"
                    )));
                }
                quantize::divide(&mut row, factor);
                small.set_row([0, index, head], &row);
            }
            index += 1;
        }
    }
    Ok(small)
}

/// A tensor without gaps in f32.
fn wide(tensor: &Tensor) -> PyResult<Tensor> {
    Tensor::from_f32(DType::F32, tensor.shape(), &contents(tensor)?)
        .map_err(|error| error::library(error.into()))
}

/// Puts parts together; log-sum-exps go to (batch, heads, length).
///
/// # Safety
///
/// The parts must be of host memory that stays as it is meanwhile, `output` of memory of their shape
/// and `lse` memory for their rows, which nobody else uses.
pub(crate) unsafe fn combine(
    parts: &Parts,
    output: &View,
    lse: u64,
    cancellation: &Cancellation,
) -> PyResult<()> {
    let [batch, length, heads, dim] = parts.outputs[0].form.sizes.map(|size| size as usize);
    let shape = Shape::new(batch, length, heads, dim);
    let mut tensors = room_for(parts.outputs.len())?;
    for (part, sums) in parts.outputs.iter().zip(&parts.lses) {
        let [by_batch, by_row, by_head, one] = sums.form.strides;
        let form = Form { strides: [by_batch, by_head, by_row, one], ..sums.form };
        let sums = View { form, ..*sums };
        // SAFETY: the caller's promise.
        let (tensor, sums) =
            unsafe { (copy(shape, part)?, copy(Shape::new(batch, heads, length, 1), &sums)?) };
        // Sums are rounded once, to what is asked for.
        let tensor = if part.form.dtype == parts.dtype { tensor } else { wide(&tensor)? };
        tensors.push((tensor, contents(&sums)?));
    }
    let borrowed = collect(tensors.iter().map(|(tensor, list)| Ok((tensor, &list[..]))))?;
    let combined = serving::combine_until(&borrowed, cancellation);
    let (mut combined, sums) = combined.map_err(error::library)?;
    if combined.dtype() != parts.dtype {
        let rounded = Tensor::from_f32(parts.dtype, shape, &contents(&combined)?);
        combined = rounded.map_err(|error| error::library(error.into()))?;
    }
    // SAFETY: the caller's promise.
    unsafe {
        write(&combined, output);
        std::ptr::copy_nonoverlapping(sums.as_ptr(), lse as *mut f32, sums.len());
    }
    Ok(())
}

/// Rows of queries, or of new keys, padded or packed.
struct Rows<'a> {
    name: &'a str,
    form: &'a Form,
    count: usize,
}

impl Rows<'_> {
    /// Where they are. Starts and lengths come with their names, and so does the most of a
    /// sequence.
    fn placement(
        &self,
        (starts_name, starts): (&str, Option<Vec<i32>>),
        (lengths_name, lengths): (&str, Option<Vec<i32>>),
        (what, most_name, most): (&str, &str, usize),
    ) -> PyResult<Placement> {
        let rows = self.form.sizes[1] as usize;
        let Some(starts) = starts else {
            return Ok(Placement::padded(match lengths {
                Some(lengths) => lengths_within(lengths_name, &lengths, |_| rows)?,
                None => repeated(rows, self.count)?,
            }));
        };
        for (sequence, pair) in starts.windows(2).enumerate() {
            if pair[0] < 0 || pair[1] < pair[0] {
                return Err(PyValueError::new_err(format!(
                    "{starts_name} goes from {} to {} in sequence {sequence}, expected cumulative \
                     lengths",
                    pair[0], pair[1]
                )));
            }
            if (pair[1] - pair[0]) as usize > most {
                return Err(PyValueError::new_err(format!(
                    "{starts_name} gives sequence {sequence} {} {what}, expected at most \
                     {most_name}={most}",
                    pair[1] - pair[0]
                )));
            }
        }
        let starts = collect(starts.into_iter().map(|start| Ok(start.max(0) as usize)))?;
        if let Some(last) = starts.last().filter(|last| **last > rows) {
            return Err(PyValueError::new_err(format!(
                "{starts_name} ends at {last}, expected at most the {rows} rows of {}",
                self.name
            )));
        }
        let placement = Placement::packed(starts);
        Ok(match lengths {
            None => placement,
            Some(lengths) => {
                let room = |at| placement.length(at);
                let lengths = lengths_within(lengths_name, &lengths, room)?;
                placement.with_lengths(lengths)
            }
        })
    }
}

/// Where sequences of these lengths are in a cache, by its list of batch entries or its table of
/// pages; names are of the cache, the list and the table.
fn in_cache(
    form: &Form,
    ends: Vec<usize>,
    (entries, pages): (Option<Vec<i32>>, Option<Vec<i32>>),
    [cache, list, table]: [&str; 3],
) -> PyResult<Placement> {
    let [there, size, ..] = form.sizes.map(|size| size as usize);
    let outside = |name: &str, sequence: usize, given: i32| {
        PyValueError::new_err(format!(
            "{name} has {given} for sequence {sequence}, expected from 0 to below the {there} of \
             {cache}"
        ))
    };
    let inside = |given: i32| usize::try_from(given).is_ok_and(|given| given < there);
    if let Some(pages) = pages {
        let columns = pages.len().checked_div(ends.len()).unwrap_or(0);
        for (sequence, end) in ends.iter().enumerate() {
            let used = &pages[sequence * columns..][..end.div_ceil(size.max(1))];
            if let Some(given) = used.iter().find(|page| !inside(**page)) {
                return Err(outside(table, sequence, *given));
            }
        }
        // What is behind a sequence's end may be anything.
        let pages = collect(pages.into_iter().map(|page| Ok(page.max(0) as u32)))?;
        let pages = Pages::new(size, columns, pages).map_err(error::value)?;
        return Ok(Placement::paged(ends, pages));
    }
    let Some(entries) = entries else {
        return Ok(Placement::padded(ends));
    };
    if let Some(sequence) = entries.iter().position(|entry| !inside(*entry)) {
        return Err(outside(list, sequence, entries[sequence]));
    }
    let entries = collect(entries.into_iter().map(|entry| Ok(entry as usize)))?;
    Ok(Placement::entries(ends, entries))
}

/// A list of lengths, each at most what there is room for.
fn lengths_within(
    name: &str,
    lengths: &[i32],
    room: impl Fn(usize) -> usize,
) -> PyResult<Vec<usize>> {
    let check = |(sequence, length): (usize, &i32)| {
        let room = room(sequence);
        usize::try_from(*length).ok().filter(|length| *length <= room).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name} has {length} for sequence {sequence}, expected from 0 to {room}"
            ))
        })
    };
    collect(lengths.iter().enumerate().map(check))
}

/// The rows of a placement, sequence after sequence.
///
/// # Safety
///
/// The placement must be inside of the view, and the view of memory that stays as it is.
unsafe fn gather(
    view: &View,
    placement: &Placement,
    cancellation: &Cancellation,
) -> PyResult<Tensor> {
    let Form { sizes: [_, _, heads, dim], dtype, .. } = view.form;
    let rows = (0..placement.sequences()).map(|sequence| placement.length(sequence)).sum();
    let shape = Shape::new(1, rows, heads as usize, dim as usize);
    let mut tensor = Tensor::zeros(dtype, shape).map_err(|error| error::library(error.into()))?;
    let bytes = (dim as usize * dtype.bytes()).max(1);
    let mut to = tensor.bytes_mut().chunks_exact_mut(bytes);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            cancellation.check().map_err(|error| error::library(error.into()))?;
            let place = placement.locate(sequence, position);
            for (head, to) in (0..heads as usize).zip(&mut to) {
                let from = vector(view, place, head) as *const u8;
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), bytes) };
            }
        }
    }
    Ok(tensor)
}

/// Writes what [`gather`] would give to where it would take it from.
///
/// # Safety
///
/// As for [`gather`]; nobody else may use the memory.
unsafe fn scatter(tensor: &Tensor, view: &View, placement: &Placement) {
    let mut from = vectors(tensor);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            // SAFETY: the caller's promise.
            unsafe { copy_row(&mut from, view, placement.locate(sequence, position)) };
        }
    }
}

/// Writes those rows of a tensor without gaps that belong to a sequence.
///
/// # Safety
///
/// The placement must be inside of the view and the tensor, and the view of memory that nobody else
/// uses.
unsafe fn write_placed(tensor: &Tensor, to: &View, placement: &Placement) {
    let Shape { length, heads, dim, .. } = tensor.shape();
    let bytes = (dim * tensor.dtype().bytes()).max(1);
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            let (entry, row) = placement.locate(sequence, position);
            let first = (entry * length + row) * heads * bytes;
            let mut from = tensor.bytes()[first..].chunks_exact(bytes);
            // SAFETY: the caller's promise.
            unsafe { copy_row(&mut from, to, (entry, row)) };
        }
    }
}

/// Writes a tensor without gaps.
///
/// # Safety
///
/// The view must be of memory that nobody else uses.
unsafe fn write(tensor: &Tensor, to: &View) {
    let Shape { batch, length, .. } = tensor.shape();
    let mut from = vectors(tensor);
    for place in (0..batch).flat_map(|entry| (0..length).map(move |row| (entry, row))) {
        // SAFETY: the caller's promise.
        unsafe { copy_row(&mut from, to, place) };
    }
}

/// A tensor with the contents of a view, gaps included.
///
/// # Safety
///
/// The view must be of memory that stays as it is.
unsafe fn copy(shape: Shape, view: &View) -> PyResult<Tensor> {
    // SAFETY: the caller's promise.
    match unsafe { lend(shape, view)? } {
        Lent::Copy(tensor) => Ok(tensor),
        Lent::View(view) => Tensor::from_bytes(view.dtype(), view.layout(), view.bytes())
            .map_err(|error| error::library(error.into())),
    }
}

/// The vectors of a tensor without gaps.
fn vectors(tensor: &Tensor) -> std::slice::ChunksExact<'_, u8> {
    let bytes = tensor.shape().dim * tensor.dtype().bytes();
    tensor.bytes().chunks_exact(bytes.max(1))
}

/// Writes the next vectors, one for each head, to a row of a view.
///
/// # Safety
///
/// The row must be inside of the view.
unsafe fn copy_row(from: &mut std::slice::ChunksExact<'_, u8>, view: &View, place: (usize, usize)) {
    for (head, from) in (0..view.form.sizes[2] as usize).zip(from) {
        let to = vector(view, place, head) as *mut u8;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

/// The address of a vector.
fn vector(view: &View, (entry, row): (usize, usize), head: usize) -> u64 {
    let [by_entry, by_row, by_head, _] = view.form.strides.map(|stride| stride as usize);
    let offset = entry * by_entry + row * by_row + head * by_head;
    view.address + (offset * view.form.dtype.bytes()) as u64
}

/// The numbers of a list.
///
/// # Safety
///
/// It must be a list of such elements without gaps in host memory.
unsafe fn list<T: Copy>(list: &Memory) -> PyResult<Vec<T>> {
    let count = list.sizes().iter().product::<i64>() as usize;
    // SAFETY: the caller's promise. A list need not be aligned: some libraries' are not.
    let at = |index| unsafe { (list.address as *const T).add(index).read_unaligned() };
    collect((0..count).map(|index| Ok(at(index))))
}

/// The numbers of a list that may not be there.
///
/// # Safety
///
/// As for [`list`].
unsafe fn optional<T: Copy>(memory: Option<&Memory>) -> PyResult<Option<Vec<T>>> {
    // SAFETY: the caller's promise.
    memory.map(|memory| unsafe { list(memory) }).transpose()
}

/// A list of equal lengths.
fn repeated(length: usize, count: usize) -> PyResult<Vec<usize>> {
    collect((0..count).map(|_| Ok(length)))
}

/// All values of a tensor in the order of its shape.
fn contents(tensor: &Tensor) -> PyResult<Vec<f32>> {
    let Shape { batch, length, heads, dim } = tensor.shape();
    let vectors = batch.saturating_mul(length).saturating_mul(heads);
    let count = vectors.saturating_mul(dim);
    let mut values = room_for(count)?;
    values.resize(count, 0.0);
    for (index, to) in values.chunks_exact_mut(dim.max(1)).enumerate() {
        let (entry, row, head) = (index / heads / length, index / heads % length, index % heads);
        tensor.head(entry, head).read(row, to);
    }
    Ok(values)
}

/// A table without gaps of any element type.
///
/// # Safety
///
/// It must be in host memory.
unsafe fn floats(table: &Memory, dtype: DType) -> PyResult<Vec<f32>> {
    let sizes = [1, table.sizes[0], 1, table.sizes[1]];
    let form = Form { sizes, strides: contiguous(sizes), dtype, place: table.place };
    let shape = Shape::from(sizes.map(|size| size as usize));
    // SAFETY: the caller's promise.
    contents(&unsafe { copy(shape, &View { address: table.address, form }) }?)
}

/// Memory at an address, which may be none where it is empty.
///
/// # Safety
///
/// It must be memory of so many elements that stays as it is.
unsafe fn slice<'a, T>(address: u64, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(address as *const T, count) },
    }
}

/// Run by Miri, for which nothing is linked (`cargo xtask miri`): nothing here may call Python.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{MOST_DIMENSIONS, Place};

    /// Two entries of three rows of two heads of two numbers, with gaps.
    fn view(numbers: &mut [f32]) -> View {
        let (sizes, strides) = ([2, 3, 2, 2], [20, 6, 3, 1]);
        let form = Form { sizes, strides, dtype: DType::F32, place: Place::Host };
        View { address: numbers.as_mut_ptr() as u64, form }
    }

    /// No byte before, between or behind what a view spans is touched, and none of it twice.
    #[test]
    fn rows_are_taken_and_put_where_a_view_says() {
        // As long as its last element needs, and no longer.
        let mut numbers: Vec<f32> = (0..20 + 12 + 3 + 2).map(|it| it as f32).collect();
        let from = view(&mut numbers);
        let placement = Placement::entries(vec![1, 3], vec![1, 0]);
        let cancellation = Cancellation::default();
        // SAFETY: of memory that is there, and of nobody else's.
        let (gathered, copied) = unsafe {
            (gather(&from, &placement, &cancellation).unwrap(), copy(Shape::new(2, 3, 2, 2), &from))
        };
        let wanted = [20, 23, 0, 3, 6, 9, 12, 15].map(|it| [it as f32, it as f32 + 1.0]);
        assert_eq!(gathered.to_f32(), wanted.concat());
        assert_eq!(copied.unwrap().head(1, 1).row(2), [35.0, 36.0]);
        let mut other = vec![-1.0; numbers.len()];
        let to = view(&mut other);
        // SAFETY: as above.
        unsafe { scatter(&gathered, &to, &placement) };
        for (index, (number, before)) in other.iter().zip(&numbers).enumerate() {
            let taken = wanted.iter().flatten().any(|it| *it == index as f32);
            assert_eq!(*number, if taken { *before } else { -1.0 }, "{index}");
        }
    }

    #[test]
    fn a_list_need_not_be_aligned() {
        let bytes: Vec<u8> = (0..13).collect();
        let mut memory = Memory {
            address: bytes.as_ptr() as u64 + 1,
            dimensions: 1,
            sizes: [1; MOST_DIMENSIONS],
            strides: [1; MOST_DIMENSIONS],
            element: crate::view::Element::I32,
            place: Place::Host,
        };
        memory.sizes[0] = 3;
        // SAFETY: twelve bytes behind the first.
        let list: Vec<i32> = unsafe { list(&memory) }.unwrap();
        assert_eq!(list, [0x0403_0201, 0x0807_0605, 0x0C0B_0A09]);
    }
}
