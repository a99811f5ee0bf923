//! Kernels that PyTorch's dispatcher calls without Python: those of our own operators, and those of
//! PyTorch's flash-attention operators after `flashcore.torch.activate`, which have PyTorch's own
//! autograd on top.
//!
//! They compute the same as the Python implementations of these operators, which serve where
//! PyTorch's stable interface is not available.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::sync::Mutex;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::boundary::{attached, guard};
use crate::error;
use crate::gradient::Backward;
use crate::launch;
use crate::numbers::Numbers;
use crate::request::{Called, Function, Request};
use crate::stable::{Arguments, Failed, Kernel, Stable, Tensor, Value, kernel};
use crate::view::{Element, Memory, View, contiguous};

kernel!(heads_first, answer_heads_first);
kernel!(heads_first_backward, answer_heads_first_backward);
kernel!(panic, answer_panic);
kernel!(attention, answer_attention);
kernel!(attention_all, answer_attention_all);
kernel!(attention_with_lse, answer_attention_with_lse);
kernel!(attention_with_lse_all, answer_attention_with_lse_all);
kernel!(attention_backward, answer_attention_backward);

/// The operators of PyTorch that are replaced.
const PYTORCH: [(&CStr, Kernel); 2] = [
    (c"_scaled_dot_product_flash_attention", heads_first),
    (c"_scaled_dot_product_flash_attention_backward", heads_first_backward),
];

/// Our operators.
const OURS: [(&CStr, Kernel); 5] = [
    (c"attention", attention),
    (c"attention.all", attention_all),
    (c"attention_with_lse", attention_with_lse),
    (c"attention_with_lse.all", attention_with_lse_all),
    (c"attention_backward", attention_backward),
];

/// An operator that panics, in a namespace of its own. For tests.
const PANICKING: (&str, [(&CStr, Kernel); 1]) = ("flashcore_panic", [(c"panic", panic)]);

/// The Python function that raises for dropout or a debug mask, which PyTorch's operators may ask
/// for.
static REFUSE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Kernels registered for the operators of a namespace under one dispatch key, until removed.
#[pyclass(module = "flashcore._flashcore", frozen)]
pub(crate) struct Kernels {
    /// PyTorch's handle of the registration; None once it was removed.
    library: Mutex<Option<usize>>,
    torch: &'static Stable,
    /// The names of the operators that have such kernels.
    #[pyo3(get)]
    operators: Vec<&'static str>,
}

#[pymethods]
impl Kernels {
    /// Registers kernels for PyTorch's operators (namespace `aten`) or for ours, in the PyTorch
    /// whose extension module is `file`. `refuse` is called with the dropout probability and
    /// whether a debug mask is wanted, if either is asked for. Returns None if that PyTorch lacks
    /// the stable interface.
    #[staticmethod]
    #[pyo3(signature = (file, namespace, key, refuse=None, /))]
    fn register(
        file: &str,
        namespace: &str,
        key: &str,
        refuse: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Option<Kernels>> {
        guard(|| {
            let Some(torch) = Stable::of(file) else { return Ok(None) };
            if let Some(refuse) = refuse {
                let _ = REFUSE.set(refuse.py(), refuse.unbind());
            }
            let kernels = match namespace {
                "aten" => &PYTORCH[..],
                _ if namespace == PANICKING.0 => &PANICKING.1,
                _ => &OURS,
            };
            let text = |text: &str| CString::new(text).map_err(error::value);
            let library = torch.register(&text(namespace)?, &text(key)?, kernels)?;
            let operators = kernels.iter().filter_map(|(name, _)| name.to_str().ok()).collect();
            Ok(Some(Kernels { library: Mutex::new(Some(library)), torch, operators }))
        })
    }

    /// Removes the registration: the operators get back the kernels that they had before.
    fn remove(&self) -> PyResult<()> {
        guard(|| {
            if let Some(library) = crate::process::lock(&self.library).take() {
                self.torch.remove(library);
            }
            Ok(())
        })
    }
}

/// `_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p, bool
/// is_causal, bool return_debug_mask, *, float? scale) -> (Tensor output, Tensor logsumexp, Tensor
/// cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor
/// debug_attn_mask)`
unsafe extern "C" fn answer_heads_first(slots: *mut u64, arguments: u64) -> *const Failed {
    let run = |torch: &'static Stable, given: &mut Arguments<'_>| -> PyResult<[Value; 9]> {
        let tensors = [given.tensor()?, given.tensor()?, given.tensor()?];
        let (dropout, causal, mask) = (given.number(), given.flag(), given.flag());
        let numbers = Numbers::plain(given.optional_number(), causal)?;
        refuse(dropout, mask)?;
        let names = Function::PyTorch.names();
        let [query, key, value] = read(&tensors, [names[0], names[1], names[2]])?;
        let order = Anchored::of(causal, &query, &key);
        let request = order.request(numbers, [&query, &key, &value])?;
        let problem = request.problem()?;
        let out = tensors[0].like(&query)?;
        let output = request.output_in(&order.turned(&out.read("out")?))?;
        let place = query.place;
        let (sums, _) = request.sums();
        let lse = torch.make(&sums, &contiguous(sums), Element::F32, place)?;
        let sums = lse.address()?;
        launch::attend(&request, &problem, &output, Some(sums), |ordinal| torch.stream(ordinal))?;
        let [state, offset] = [&[2][..], &[]].map(|sizes| torch.make_words(sizes, place));
        let none = torch.make(&[0], &[1], query.element, place)?;
        Ok([
            Value::Tensor(out),
            Value::Tensor(lse),
            Value::Tensor(torch.undefined()?),
            Value::Tensor(torch.undefined()?),
            Value::Whole(query.sizes[2]),
            Value::Whole(key.sizes[2]),
            Value::Tensor(state?),
            Value::Tensor(offset?),
            Value::Tensor(none),
        ])
    };
    // SAFETY: the slots are PyTorch's; `run` takes and returns what the schema above says.
    unsafe { Stable::answer(slots, arguments, run) }
}

/// `_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value,
/// Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float
/// dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale) -> (Tensor
/// grad_query, Tensor grad_key, Tensor grad_value)`
unsafe extern "C" fn answer_heads_first_backward(slots: *mut u64, arguments: u64) -> *const Failed {
    let run = |torch: &'static Stable, given: &mut Arguments<'_>| -> PyResult<[Value; 3]> {
        let dout = given.tensor()?;
        let tensors = [given.tensor()?, given.tensor()?, given.tensor()?];
        let (out, lse) = (given.tensor()?, given.tensor()?);
        let _lists = [given.tensor()?, given.tensor()?];
        let _most = [given.whole(), given.whole()];
        let (dropout, causal) = (given.number(), given.flag());
        let _random = [given.tensor()?, given.tensor()?];
        let numbers = Numbers::plain(given.optional_number(), causal)?;
        refuse(dropout, false)?;
        let copies = Copies::default();
        let walkable = |tensor: &Tensor, name: &str| copies.read(tensor, name, Memory::is_walkable);
        let [query, key, value, output, output_gradient] = {
            let [q, k, v] = &tensors;
            let all = [(q, "query"), (k, "key"), (v, "value"), (&out, "out"), (&dout, "dout")];
            let [q, k, v, out, dout] = all.map(|(tensor, name)| walkable(tensor, name));
            [q?, k?, v?, out?, dout?]
        };
        let [q, k, v] = &tensors;
        let gradients = [(q, "query"), (k, "key"), (v, "value")]
            .map(|(tensor, name)| tensor.like(&tensor.read(name)?));
        let [dq, dk, dv] = gradients;
        let gradients = [dq?, dk?, dv?];
        let order = Anchored::of(causal, &query, &key);
        let request = order.request(numbers, [&query, &key, &value])?;
        let view = |name, memory: &Memory| order.view(name, memory);
        let [dq, dk, dv] = read(&gradients, ["dq", "dk", "dv"])?;
        let lse = copies.read(&lse, "softmax_lse", Memory::is_contiguous)?;
        let call = Backward {
            output: view("out", &output)?,
            lse,
            output_gradient: view("dout", &output_gradient)?,
            lse_gradient: None,
            gradients: [view("dq", &dq)?, view("dk", &dk)?, view("dv", &dv)?],
            sinks: None,
            request,
        };
        call.check()?;
        run_backward(torch, &call, torch.is_deterministic(), &gradients)?;
        Ok(gradients.map(Value::Tensor))
    };
    // SAFETY: the slots are PyTorch's; `run` takes and returns what the schema above says.
    unsafe { Stable::answer(slots, arguments, run) }
}

unsafe extern "C" fn answer_panic(slots: *mut u64, arguments: u64) -> *const Failed {
    let run = |_: &'static Stable, given: &mut Arguments<'_>| -> PyResult<[Value; 1]> {
        let _tensor = given.tensor()?;
        panic!("a kernel that panics")
    };
    // SAFETY: the slots are PyTorch's; the schema is the one that the test registers.
    unsafe { Stable::answer(slots, arguments, run) }
}

/// Writes the gradients; they are zero if the query, key or value tensor is empty.
fn run_backward<'a>(
    torch: &'static Stable,
    call: &Backward,
    deterministic: bool,
    gradients: impl IntoIterator<Item = &'a Tensor>,
) -> PyResult<()> {
    match call.is_zero()? {
        true => gradients.into_iter().try_for_each(|gradient| gradient.clear("gradients")),
        false => launch::differentiate(call, deterministic, |ordinal| torch.stream(ordinal)),
    }
}

/// Copies of tensors whose layout kernels cannot read, kept alive until the launch.
#[derive(Default)]
struct Copies(RefCell<Vec<Tensor>>);

impl Copies {
    /// Reads a tensor, or a contiguous copy of it if its layout does not satisfy `fits`.
    fn read(
        &self,
        tensor: &Tensor,
        name: &str,
        fits: impl FnOnce(&Memory) -> bool,
    ) -> PyResult<Memory> {
        let memory = tensor.read(name)?;
        if fits(&memory) {
            return Ok(memory);
        }
        let copy = tensor.contiguous(&memory)?;
        let memory = copy.read(name);
        self.0.borrow_mut().push(copy);
        memory
    }
}

/// Where a causal mask is anchored: PyTorch's `scaled_dot_product_attention` anchors it at the
/// first key, PyTorch's operators at the last one. With as many keys as queries the two agree.
#[derive(Clone, Copy)]
enum Anchored {
    First,
    Last,
}

impl Anchored {
    fn of(causal: bool, query: &Memory, key: &Memory) -> Self {
        let same = !causal || query.sizes[2] == key.sizes[2];
        if same { Anchored::First } else { Anchored::Last }
    }

    fn function(self) -> Function {
        match self {
            Anchored::First => Function::PyTorch,
            Anchored::Last => Function::Plain,
        }
    }

    /// Converts a (batch, heads, length, dim) tensor to the order that [`Anchored::function`]
    /// takes.
    fn turned(self, memory: &Memory) -> Memory {
        match self {
            Anchored::First => *memory,
            Anchored::Last => memory.transposed(),
        }
    }

    fn view(self, name: &str, memory: &Memory) -> PyResult<View> {
        self.function().order(false).view(name, &self.turned(memory))
    }

    fn request(self, numbers: Numbers, tensors: [&Memory; 3]) -> PyResult<Request> {
        let is_given = |at: usize| at < tensors.len();
        Request::new(self.function(), is_given, numbers, |at, _| Ok(self.turned(tensors[at])))
    }
}

fn read<const COUNT: usize>(
    tensors: &[Tensor; COUNT],
    names: [&str; COUNT],
) -> PyResult<[Memory; COUNT]> {
    let mut memories = [None; COUNT];
    for ((memory, tensor), name) in memories.iter_mut().zip(tensors).zip(names) {
        *memory = Some(tensor.read(name)?);
    }
    Ok(memories.map(|memory| memory.expect("each was read")))
}

/// Refuses what PyTorch's operators can do and these kernels cannot, with the error that Python
/// raises.
fn refuse(dropout: f64, mask: bool) -> PyResult<()> {
    if dropout == 0.0 && !mask {
        return Ok(());
    }
    let told = attached(|py| Some(REFUSE.get(py)?.call1(py, (dropout, mask)).map(drop)));
    told.flatten().unwrap_or_else(|| Err(PyRuntimeError::new_err("dropout is not supported")))
}

unsafe extern "C" fn answer_attention(slots: *mut u64, arguments: u64) -> *const Failed {
    // SAFETY: the slots are PyTorch's; the schema is in `_torch.py`, here and below.
    unsafe { Stable::answer(slots, arguments, |torch, given| Ours::few(given)?.output(torch)) }
}

unsafe extern "C" fn answer_attention_all(slots: *mut u64, arguments: u64) -> *const Failed {
    // SAFETY: as above.
    unsafe { Stable::answer(slots, arguments, |torch, given| Ours::all(given)?.output(torch)) }
}

unsafe extern "C" fn answer_attention_with_lse(slots: *mut u64, arguments: u64) -> *const Failed {
    // SAFETY: as above.
    unsafe { Stable::answer(slots, arguments, |torch, given| Ours::few(given)?.both(torch)) }
}

unsafe extern "C" fn answer_attention_with_lse_all(
    slots: *mut u64,
    arguments: u64,
) -> *const Failed {
    // SAFETY: as above.
    unsafe { Stable::answer(slots, arguments, |torch, given| Ours::all(given)?.both(torch)) }
}

/// `(Tensor dout, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor softmax_lse, Tensor? dlse`, the
/// [rest](Ours::rest), `bool[] needed) -> Tensor[]`
unsafe extern "C" fn answer_attention_backward(slots: *mut u64, arguments: u64) -> *const Failed {
    let run = |torch: &'static Stable, given: &mut Arguments<'_>| -> PyResult<[Value; 1]> {
        let dout = given.tensor()?;
        let first = [Some(given.tensor()?), given.optional_tensor()?, given.optional_tensor()?];
        let results = [given.tensor()?, given.tensor()?];
        let dlse = given.optional_tensor()?;
        let (call, needed) = (Ours::rest(first, given), given.flags());
        let gradients = call?.differentiate(torch, results, (dout, dlse), &needed?)?;
        Ok([torch.list(gradients)?])
    };
    // SAFETY: as above.
    unsafe { Stable::answer(slots, arguments, run) }
}

/// The number of optional tensors of our operators: lists, slopes, sinks and descale factors.
const LISTS: usize = 12;
/// The index of the sinks among them.
const SINKS: usize = 8;

/// The arguments of a call of one of our operators.
struct Ours {
    /// Queries, keys and values; a tensor that is packed into an earlier one is missing.
    first: [Option<Tensor>; 3],
    lists: [Option<Tensor>; LISTS],
    numbers: Numbers,
    called: Called,
    /// Whether gradients must be bitwise reproducible.
    deterministic: bool,
}

impl Ours {
    /// `(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal)`
    fn few(given: &mut Arguments<'_>) -> PyResult<Self> {
        let first = [given.tensor()?, given.tensor()?, given.tensor()?].map(Some);
        let numbers = Numbers::plain(given.optional_number(), given.flag())?;
        let called = Called { function: Function::Plain, batch_invariant: false };
        let lists = [const { None }; LISTS];
        Ok(Ours { first, lists, numbers, called, deterministic: false })
    }

    /// `(Tensor q, Tensor? k, Tensor? v`, and the [rest](Ours::rest)
    fn all(given: &mut Arguments<'_>) -> PyResult<Self> {
        let first = [Some(given.tensor()?), given.optional_tensor()?, given.optional_tensor()?];
        Ours::rest(first, given)
    }

    /// The [numbers](Numbers::of_arguments), `Tensor?` for each of the lists, `str function, bool
    /// deterministic`
    fn rest(first: [Option<Tensor>; 3], given: &mut Arguments<'_>) -> PyResult<Self> {
        // Refused after all arguments were taken: tensors that nobody takes are never freed.
        let numbers = Numbers::of_arguments(given);
        let mut lists = [const { None }; LISTS];
        for list in &mut lists {
            *list = given.optional_tensor()?;
        }
        let function = given.text();
        let deterministic = given.flag();
        let called = Called::named(&function?)?;
        let mut numbers = numbers?;
        numbers.batch_invariant = called.batch_invariant;
        Ok(Ours { first, lists, numbers, called, deterministic })
    }

    fn output(self, torch: &'static Stable) -> PyResult<[Value; 1]> {
        let (out, _) = self.run(torch, false)?;
        Ok([Value::Tensor(out)])
    }

    fn both(self, torch: &'static Stable) -> PyResult<[Value; 2]> {
        let (out, lse) = self.run(torch, true)?;
        Ok([Value::Tensor(out), Value::Tensor(lse.map_or_else(|| torch.undefined(), Ok)?)])
    }

    fn run(&self, torch: &'static Stable, with_lse: bool) -> PyResult<(Tensor, Option<Tensor>)> {
        let copies = Copies::default();
        let request = self.request(&copies, |_| true)?;
        let problem = request.problem()?;
        let (output, place) = (request.output(), request.given.place);
        let out = torch.make(output.sizes(), output.strides(), output.element, place)?;
        let (sizes, hidden) = request.sums();
        let strides = contiguous(sizes);
        let sums = || {
            let float = Element::F32;
            torch.make(&sizes[hidden..], &strides[hidden..], float, place)
        };
        let lse = with_lse.then(sums).transpose()?;
        let sums = lse.as_ref().map(Tensor::address).transpose()?;
        let output = request.output_at(out.address()?)?;
        launch::attend(&request, &problem, &output, sums, |ordinal| torch.stream(ordinal))?;
        Ok((out, lse))
    }

    /// Reads the request; query, key and value tensors that do not satisfy `fits` are copied.
    fn request(&self, copies: &Copies, fits: fn(&Memory) -> bool) -> PyResult<Request> {
        let names = self.called.function.names();
        let rows = self.first.len();
        let list = |at: usize| self.lists.get(at - rows).and_then(Option::as_ref);
        let is_given = |at: usize| at < rows || list(at).is_some();
        Request::new(self.called.function, is_given, self.numbers, |at, whole| match at >= rows {
            true => {
                let list = list(at).ok_or_else(|| error::value("a list is missing"))?;
                copies.read(list, names[at], |memory| !whole || memory.is_contiguous())
            }
            false => {
                let (tensor, part) = row(&self.first, at, names[at])?;
                let fits = |memory: &Memory| fits(&of(*memory, part));
                Ok(of(copies.read(tensor, names[at], fits)?, part))
            }
        })
    }

    /// Computes gradients of queries, keys, values and sinks from O, the log-sum-exps and their
    /// gradients, and returns those that are `needed`.
    fn differentiate(
        self,
        torch: &'static Stable,
        [out, lse]: [Tensor; 2],
        (dout, dlse): (Tensor, Option<Tensor>),
        needed: &[bool],
    ) -> PyResult<Vec<Tensor>> {
        let function = self.called.function;
        let copies = Copies::default();
        let request = self.request(&copies, Memory::is_walkable)?;
        let (queries, keys) = (request.query_starts.is_some(), request.key_starts.is_some());
        let (first, sinks) = self.gradients(&request, needed)?;
        let saved = |tensor: &Tensor, name: &str| -> PyResult<View> {
            let memory = copies.read(tensor, name, Memory::is_walkable)?;
            function.order(queries).view(name, &memory)
        };
        let gradient = |at: usize, name: &str, packed: bool| -> PyResult<View> {
            let (tensor, part) = row(&first, at, name)?;
            function.order(packed).view(name, &of(tensor.read(name)?, part))
        };
        let sums = |tensor: &Tensor, name| copies.read(tensor, name, Memory::is_contiguous);
        let call = Backward {
            output: saved(&out, "out")?,
            lse: sums(&lse, "softmax_lse")?,
            output_gradient: saved(&dout, "dout")?,
            lse_gradient: dlse.as_ref().map(|dlse| sums(dlse, "dlse")).transpose()?,
            gradients: [
                gradient(0, "dq", queries)?,
                gradient(1, "dk", keys)?,
                gradient(2, "dv", keys)?,
            ],
            sinks: sinks.as_ref().map(|sinks| sinks.read("ds_aux")).transpose()?,
            request,
        };
        call.check()?;
        let [q, k, v] = first;
        let all = [q, k, v, sinks];
        run_backward(torch, &call, self.deterministic, all.iter().flatten())?;
        let chosen = all.into_iter().zip(needed).filter(|(_, need)| **need);
        Ok(chosen.filter_map(|(gradient, _)| gradient).collect())
    }

    /// Allocates the gradients of queries, keys, values and sinks. A needed gradient is zeroed
    /// first if the kernels do not write all of it: rows that belong to no sequence, and keys
    /// beyond the last query of a causal mask anchored at the first key.
    fn gradients(
        &self,
        request: &Request,
        needed: &[bool],
    ) -> PyResult<([Option<Tensor>; 3], Option<Tensor>)> {
        let lengths = self.lists[..4].iter().any(Option::is_some);
        let [queries, keys] = [&request.query, &request.key].map(|view| view.form.sizes[1]);
        let first_key = self.called.function == Function::PyTorch;
        let some = lengths || (self.numbers.causal && first_key && keys > queries);
        let make = |tensor: &Option<Tensor>, at: usize| -> PyResult<Option<Tensor>> {
            let Some(tensor) = tensor else { return Ok(None) };
            let made = tensor.like(&tensor.read("a tensor")?)?;
            if some && needed.get(at).is_some_and(|need| *need) {
                made.clear("gradients")?;
            }
            Ok(Some(made))
        };
        let [q, k, v] = &self.first;
        Ok(([make(q, 0)?, make(k, 1)?, make(v, 2)?], make(&self.lists[SINKS], 3)?))
    }
}

/// Returns the tensor that holds the queries (0), keys (1) or values (2), and their index in it if
/// it is packed.
fn row<'a>(
    tensors: &'a [Option<Tensor>; 3],
    at: usize,
    name: &str,
) -> PyResult<(&'a Tensor, Option<u64>)> {
    match (tensors, at) {
        ([Some(qkv), None, _], at) => Ok((qkv, Some(at as u64))),
        ([_, Some(kv), None], 1 | 2) => Ok((kv, Some(at as u64 - 1))),
        (tensors, at) => match &tensors[at] {
            Some(tensor) => Ok((tensor, None)),
            None => Err(error::value(format!("{name} is missing"))),
        },
    }
}

/// Selects a part of a packed tensor; an unpacked tensor is returned as it is.
fn of(memory: Memory, part: Option<u64>) -> Memory {
    part.map_or(memory, |part| memory.part(part))
}
