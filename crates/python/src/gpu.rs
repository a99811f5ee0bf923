//! Devices and their plans: made at the first call of a kind, found again at the next.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda::{Buffer, DeviceAddress, RelaxedCapture, Stream};
use flashcore::gpu::{AttentionPlan, DeviceTensor, ForwardTensors, Gpu};
use flashcore::{Error, Preference, Problem};

use crate::plans::Plans;
use crate::serving;
use crate::view::{self, Convention, Form, View};

/// A GPU with the plans made on it. One that was opened stays: kernels may run on it until the
/// process ends.
pub(crate) struct Device {
    pub(crate) gpu: Gpu,
    plans: Plans<Key, Entry>,
    /// Room for log-sum-exps that nobody asked for. The kernels write them anyway; that several
    /// launches write to one place does no harm, since it is never read. A graph may know a
    /// buffer's address, so none is given back; each is at least twice as large as the last.
    unread: Mutex<Vec<Buffer>>,
    pub(crate) serving: serving::gpu::Served,
}

/// The plans that a device keeps at most, but for those that a graph has captured.
const CAPACITY: usize = 1024;

/// What a plan depends on. Two calls with the same key differ in addresses alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) forms: [Form; 3],
    /// Whether every address is one that the copy engine takes.
    pub(crate) aligned: bool,
    pub(crate) scale: Option<u64>,
    pub(crate) causal: bool,
    pub(crate) convention: Convention,
}

impl Key {
    pub(crate) fn new(
        views: &[View; 3],
        scale: Option<f64>,
        causal: bool,
        convention: Convention,
    ) -> Self {
        Key {
            forms: views.each_ref().map(|view| view.form),
            aligned: views.iter().all(|view| view.address.is_multiple_of(16)),
            scale: scale.map(f64::to_bits),
            causal,
            convention,
        }
    }
}

/// A problem with its plan.
pub(crate) struct Entry {
    pub(crate) problem: Problem,
    /// In our order.
    pub(crate) output: Form,
    /// Nothing where there is nothing to do.
    pub(crate) plan: Option<AttentionPlan>,
    /// Copies of the plan that nobody is launching. Each holds the arguments of its last launch,
    /// so as many come to be as threads launch at the same time.
    idle: Mutex<Vec<AttentionPlan>>,
    /// Where log-sum-exps go that nobody asked for.
    unread: DeviceAddress,
    /// Whether a graph may launch it again at any time.
    captured: AtomicBool,
}

/// The devices that were opened, by their ordinals. They stay open to the end of the process.
static DEVICES: Mutex<Vec<(u32, &'static Device)>> = Mutex::new(Vec::new());

/// Waits for the kernels that are still being compiled: a thread inside the compiler while the
/// process ends would crash it.
pub(crate) fn finish_compiling() {
    let devices = lock(&DEVICES).clone();
    for (_, device) in devices {
        device.gpu.finish_compiling();
    }
}

/// The device of an ordinal, opened the first time.
pub(crate) fn device(ordinal: u32) -> Result<&'static Device, Error> {
    let mut devices = lock(&DEVICES);
    if let Some((_, device)) = devices.iter().find(|(found, _)| *found == ordinal) {
        return Ok(device);
    }
    let _relaxed = RelaxedCapture::begin()?;
    let device: &'static Device = Box::leak(Box::new(Device {
        gpu: Gpu::open(ordinal)?,
        plans: Plans::new(CAPACITY, |_, entry: &Entry| entry.captured.load(Ordering::Relaxed)),
        unread: Mutex::default(),
        serving: serving::gpu::Served::new(),
    }));
    devices.push((ordinal, device));
    Ok(device)
}

impl Device {
    /// The plan of an earlier call.
    pub(crate) fn find(&self, key: &Key) -> Option<Arc<Entry>> {
        self.plans.find(key)
    }

    /// Makes the plan for a problem that was checked. Compiles where need be.
    pub(crate) fn plan(
        &self,
        key: Key,
        problem: Problem,
        views: &[View; 3],
    ) -> Result<Arc<Entry>, Error> {
        let _relaxed = RelaxedCapture::begin()?;
        let output = output(&problem, &key);
        let (mut plan, mut unread) = (None, DeviceAddress(0));
        if problem.rows() > 0 {
            // The output is as well aligned as allocators make it.
            let tensors = tensors(views, &output, DeviceAddress(0), DeviceAddress(0));
            let preference = Preference::from_environment();
            plan = Some(AttentionPlan::new(&self.gpu, &problem, &tensors, &preference)?);
            unread = self.unread(4 * problem.rows() as u64)?;
        }
        let entry = Entry {
            problem,
            output,
            plan,
            idle: Mutex::default(),
            unread,
            captured: AtomicBool::new(false),
        };
        // Old ones are dropped under the relaxed mode.
        let (entry, _old) = self.plans.keep(key, entry);
        Ok(entry)
    }

    /// Room that nobody reads.
    pub(crate) fn unread(&self, bytes: u64) -> Result<DeviceAddress, Error> {
        let mut buffers = lock(&self.unread);
        if let Some(buffer) = buffers.last().filter(|buffer| buffer.bytes() >= bytes) {
            return Ok(buffer.address());
        }
        let least = buffers.last().map_or(1 << 16, |buffer| 2 * buffer.bytes());
        let buffer = Buffer::new(self.gpu.device(), bytes.max(least))?;
        let address = buffer.address();
        buffers.push(buffer);
        Ok(address)
    }

    /// Puts a plan on a stream. Log-sum-exps go to `lse`, or nowhere.
    pub(crate) fn launch(
        &self,
        entry: &Entry,
        stream: &Stream,
        views: &[View; 3],
        output: u64,
        lse: Option<u64>,
    ) -> Result<(), Error> {
        let Some(template) = &entry.plan else {
            return Ok(());
        };
        // The default stream cannot be captured, and asking is an error while others are.
        if stream.handle() != 0 && stream.is_capturing()? {
            entry.captured.store(true, Ordering::Relaxed);
        }
        let lse = lse.map_or(entry.unread, DeviceAddress);
        let tensors = tensors(views, &entry.output, DeviceAddress(output), lse);
        let idle = lock(&entry.idle).pop();
        let mut plan = idle.unwrap_or_else(|| template.clone());
        let result = plan.launch(stream, &tensors);
        lock(&entry.idle).push(plan);
        Ok(result?)
    }
}

/// The output's form: like the caller's own tensors without gaps, but in our order.
pub(crate) fn output(problem: &Problem, key: &Key) -> Form {
    let sizes = <[usize; 4]>::from(problem.output_shape()).map(|size| size as i64);
    Form { sizes, strides: view::contiguous(key.convention, sizes), ..key.forms[0] }
}

fn tensors(
    views: &[View; 3],
    output: &Form,
    address: DeviceAddress,
    lse: DeviceAddress,
) -> ForwardTensors {
    let [query, key, value] = views.each_ref().map(|view| DeviceTensor {
        address: DeviceAddress(view.address),
        strides: view::strides(view.form.strides),
    });
    let output = DeviceTensor { address, strides: view::strides(output.strides) };
    ForwardTensors { query, key, value, output, lse }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
